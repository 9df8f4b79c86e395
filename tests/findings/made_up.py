"""Diagnoses that no profile gave, to test how one is shown."""

from dataclasses import replace
from typing import Any

from helpers.findings.summary import ESTIMATE, MEASURED, Diagnosis, Finding
from helpers.findings.trace import Note

LAUNCHES = Finding(
    finding="launch-bound loop",
    part="idle",
    gain_ms=40.0,
    gain_share=0.4,
    where="src/train.py:42 in step",
    evidence="900 kernels of 43 µs at 247 µs a launch",
    advice='torch.compile(model, mode="reduce-overhead") replays the step as one CUDA graph',
    sure=ESTIMATE,
)
REDUCTIONS = replace(
    LAUNCHES, finding="small all-reduces", part="communication", gain_ms=10.0, gain_share=0.1, sure=MEASURED
)


def diagnosis(**changes: Any) -> Diagnosis:
    """A GPU that idles for half of a step of 100 ms."""
    made = Diagnosis(
        verdict="The host holds the step up: the device idles 50% of the time.",
        bound="host",
        steps=5,
        step_ms=100.0,
        account={"compute": 0.3, "communication": 0.15, "copies": 0.05, "idle": 0.5},
        idle={"inside an op": 0.4, "Python": 0.1},
        host=None,
        findings=(LAUNCHES, REDUCTIONS),
        notes=(Note("outliers", "step 3 is an outlier: record again"),),
    )
    return replace(made, **changes)
