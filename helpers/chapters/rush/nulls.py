"""A rung of the ladder against itself: what an interval of the ladder's trials must hold, and what a start adds."""

import dataclasses
import statistics
from types import SimpleNamespace

import numpy as np
import pandas as pd

from ...book import Worth
from ...book.table import table
from ...book.values import PERCENT, Number, derived, lacking
from ...lab.estimate import LUCK_HERE
from ...lab.rows import Row
from ...lab.trials import Program, trial
from ...lab.trials.start_noise import of_ratios
from ...rush.measurement import in_turns
from .setups import FULL, MEDIUM, SMALL, missing, setup_of, training_step

EAGER, CAPTURED = "FlashAttention", "CUDA graph"  # bound by the host's launches, and one launch a step
IN_ONE, IN_TWO = {"processes": 1, "trial_s": 5.0}, {"processes": 2, "trial_s": 20.0}


def _nulls(sizes: Row) -> list[Row]:
    """Three trials in one process, whose ratios' deviation is asked for, and one of two processes, twice started."""
    trials = [*(IN_ONE | {"number": number} for number in range(3)), IN_TWO | {"number": 0}]
    return [sizes | {"step": step} | each for step in (EAGER, CAPTURED) for each in trials]


@table(
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


@nulls.numbers()
def _(rows: pd.DataFrame) -> SimpleNamespace:
    """Rungs in turns with themselves: intervals that leave 1 out, and the deviation of the ratios in one process."""
    rows = rows.reindex(columns=rows.columns.union(["low", "high", "ratio", "pairs", "starts"])).dropna(subset="ratio")
    excluded, one = (rows["low"] > 1) | (rows["high"] < 1), rows[rows["processes"] == 1]
    cells = rows.assign(trials=1, excluded=excluded, farthest=100 * (rows["ratio"] - 1).abs())
    cells = cells.groupby(["step", "processes"], sort=False)
    shown = cells.agg({"trials": "sum", "pairs": "median", "excluded": "sum", "farthest": "max"})
    heads = {"step": "rung", "excluded": "intervals without 1", "farthest": "farthest from 1, %"}
    there = of_ratios(np.log(one["ratio"]), one["starts"]) if len(one) else None
    return SimpleNamespace(
        table=shown.reset_index().rename(columns=heads),
        model=next(iter(rows["model"]), ""),
        luck=Number(there.value, PERCENT, there.low, there.high, there.trials, decimals=2)
        if there
        else lacking("trials in one process", PERCENT),
        assumed=derived(LUCK_HERE, "assumed", PERCENT, 1),
    )
