"""What glibc's defaults cost a plain loop on a CPU, against an allocator that keeps its pages."""

import dataclasses
from types import SimpleNamespace

import pandas as pd

from ...book.table import Worth, table
from ...book.values import TIMES, lacking, speedup
from ...lab import Row
from ...lab.trials import Program, trial
from ...rush.setup import START
from .setups import ON_CPU, SMALL, missing, setup_of, training_step

STEP = f"{training_step.__module__}:training_step"


@table(
    small=[SMALL | {"trial_s": 4.0, "rung": START}],
    cpu=[ON_CPU | {"trial_s": 90.0, "rung": START}],
    gpu=[],
    columns="median_ms baseline baseline_ms",
    version=4,
    timed=False,
    missing=lambda rung, **sizes: missing(step=rung, **sizes),
    worth=Worth(20, "what glibc's defaults cost", cpu=94, gpu=94, big_gpu=0),
)
def allocator(model: str, sequence: int, trial_s: float, rung: str) -> Row:
    """A rung whose allocator keeps its pages against the same rung with glibc's defaults."""
    kept = setup_of(model, sequence, rung)
    sides = []
    for setup in (dataclasses.replace(kept, allocator="default"), kept):
        step = {"function": STEP, "arguments": {"setup": dataclasses.asdict(setup)}}
        sides.append(Program(setup.allocator, environment=setup.environment, **step))
    return trial(*sides, seconds=trial_s, drop=0, turn_steps=1, wanted=2)  # nothing is queued, so all steps count


@allocator.numbers()
def _(rows: pd.DataFrame) -> SimpleNamespace:
    """What keeping the pages of freed memory is worth to the plain loop."""
    plain = rows[rows["rung"] == START]
    worth = speedup(plain.iloc[0], 2) if len(plain) else lacking("the plain loop's trial", TIMES)
    return SimpleNamespace(plain=worth, sequence=int(rows["sequence"].iloc[0]))
