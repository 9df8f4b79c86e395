"""A rung of the ladder against itself: what an interval of the ladder's trials must hold, and what a start adds."""

import dataclasses
import statistics

from ...lab import Worth, experiment
from ...lab.records import Row
from ...lab.trials import Program, trial
from ...rush.measurement import in_turns
from .pairs import training_step
from .steps import FULL, MEDIUM, SMALL, missing, setup_of

EAGER, CAPTURED = "FlashAttention", "CUDA graph"  # bound by the host's launches, and one launch a step
IN_ONE, IN_TWO = {"processes": 1, "trial_s": 5.0}, {"processes": 2, "trial_s": 20.0}


def _nulls(sizes: Row) -> list[Row]:
    """Three trials in one process, whose ratios' deviation is asked for, and one of two processes, twice started."""
    trials = [*(IN_ONE | {"number": number} for number in range(3)), IN_TWO | {"number": 0}]
    return [sizes | {"step": step} | each for step in (EAGER, CAPTURED) for each in trials]


@experiment(
    small=[SMALL | {"step": "fused AdamW"} | kind | {"trial_s": 3.0, "number": 0} for kind in (IN_ONE, IN_TWO)],
    cpu=[],  # a CPU's are those of chapter 3
    gpu=_nulls(MEDIUM),
    big_gpu=_nulls(FULL),
    columns="median_ms baseline? baseline_ms",
    timed=False,
    missing=lambda step, **sizes: missing(step=step, **sizes),
    worth=Worth(30, "what trials on a GPU say of equal programs", gpu=15, big_gpu=35, on_gpu=5),
)
def nulls(model: str, sequence: int, step: str, processes: int, trial_s: float, number: int) -> Row:
    """A rung in turns with the same rung: two trainers in one process, or each in a process of its own.

    Both processes hold their memory all the time; the one that waits is stopped.
    """
    setup = setup_of(model, sequence, step)
    if processes == 1:
        step_ms, row = in_turns(setup, setup, trial_s)
        return {"median_ms": statistics.median(step_ms)} | row
    step_of = {
        "function": f"{training_step.__module__}:training_step",
        "arguments": {"setup": dataclasses.asdict(setup)},
    }
    return trial(Program("one", **step_of), Program("same", **step_of), seconds=trial_s, wanted=2)
