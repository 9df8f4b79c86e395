"""The ladder of the course's task, with what its author printed of each step, beside ours in the same order."""

from dataclasses import replace
from types import SimpleNamespace

import pandas as pd

from ...book.table import numbers_of
from ...book.values import TIMES, Number, derived, in_unit, lacking, over, pick
from ...rush.setup import START, stands_on
from .checkpointing import checkpointing
from .ladder import MIXED, NAMED, ladder
from .pairs import pairs

FLASH, COMPILED, ADAMW = NAMED["flash"], NAMED["compiled"], NAMED["adamw"]
# As printed, of one A100 with 80 GB, Llama-3.2-1B and 2,048 tokens: speed and memory over the step before
PRINTED = {
    MIXED: (3.5, None),
    ADAMW: (1.1, None),
    FLASH: (1.75, 0.7),
    COMPILED: (1.2, 0.9),
    "batch 4": (None, None),
    "batch 8": (None, None),
}
CHECKPOINTED = (0.6, None)  # at 4,096 tokens


@numbers_of([ladder], beside=[pairs, checkpointing])
def task_steps(rows: pd.DataFrame, trials: pd.DataFrame, checkpointed: pd.DataFrame) -> SimpleNamespace:
    """The task's steps; mixed precision there is over fp32, so ours is over the plain loop, TF32 and all."""
    ours = ladder.of_rows(rows, pd.DataFrame(), trials, pd.DataFrame())
    peaks = {step: pick(rows, "peak_gib", step=step) for step in (START, *PRINTED, "cuDNN attention")}
    lines = []
    for step, printed in PRINTED.items():
        below = START if step == MIXED else stands_on(step)
        gain = ours.rung.in_16_bits if step == MIXED else ours.gains.get(step, lacking("this rung"))
        lines.append(_line(step, printed, gain, over(peaks[step], peaks.get(below, lacking("its peak")))))
    if len(checkpointed):
        full = checkpointing.of_rows(checkpointed)
        gain, memory = (in_unit(number, TIMES, 2) for number in (full.speed, full.memory))
        lines.append(_line(f"full checkpointing, {full.length:,} tokens", CHECKPOINTED, gain, memory))
    return SimpleNamespace(table=pd.DataFrame(lines))


def _line(step: str, printed: tuple[float | None, float | None], gain: Number, memory: Number) -> dict:
    speed, peak = (derived(value, "printed", decimals=2) if value else lacking("a figure") for value in printed)
    measured = f"{gain:bare}" if gain.measured else "–"
    peaks = replace(memory, derivation="allocated bytes", decimals=2, low=None, high=None)
    return {"step": step, "speed, task": speed, "speed, ours": measured, "memory, task": peak, "memory, ours": peaks}
