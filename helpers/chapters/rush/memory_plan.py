"""SIMULATED: the memory of one of many ranks, counted on tensors without memory."""

from types import SimpleNamespace

import pandas as pd

from ...book.table import Worth, table
from ...distributed import Job
from ...fit import rank_memory
from ...lab import Row
from .predictions import PLANNED, SHARDED, STRATEGIES
from .setups import TINY

EIGHT_B = "llama-3.1-8b"


@table(
    small=[{"model": TINY, "strategy": "zero3", "ranks": 2}],
    cpu=[{"model": EIGHT_B, "strategy": name, "ranks": ranks} for name in SHARDED for ranks in (2, 8, 64, 512)],
    gpu=[],  # counted on tensors without memory
    columns="peak_gib",
    memory_here=False,
    worth=Worth(1, "memory on many cards, counted", cpu=8.1),
)
def memory_plan(model: str, strategy: str, ranks: int) -> Row:
    """SIMULATED: memory of one of `ranks` ranks with one sequence each; the other ranks do not exist."""
    sequence = 64 if model == TINY else 4096
    job = Job(strategy=strategy, model=model, batch=ranks, sequence=sequence, **PLANNED)
    return {"peak_gib": rank_memory(job, ranks)}


@memory_plan.numbers()
def _(rows: pd.DataFrame) -> SimpleNamespace:
    """The simulated peak of one of many ranks."""
    return SimpleNamespace(peaks=rows.replace({"strategy": STRATEGIES}))
