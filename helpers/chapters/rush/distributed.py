"""The tiny model trained by each strategy on real processes: what a rank holds, and the loss."""

import math
from types import SimpleNamespace

import pandas as pd

from ...book.table import Worth, table
from ...book.values import Number, derived, pick
from ...distributed import Job
from ...distributed import measure as measure_ranks
from ...lab import STATUS, Row
from ...lab.memory import MIB
from .predictions import SHARDED

HELD = ["parameter_bytes", "gradient_bytes", "optimizer_bytes"]


@table(
    small=[{"ranks": 2}],
    cpu=[{"ranks": ranks} for ranks in (1, 2, 4)],
    gpu=[],  # the ranks are processes on CPUs
    columns=["strategy", "step_ms", *HELD, "last_loss"],
    worth=Worth(2, "strategies on many ranks", cpu=5.9),
)
def distributed(ranks: int) -> list[Row]:
    """The tiny model on real CPU processes, by each strategy: bytes a rank, and the loss after 20 steps.

    Processes on one CPU share its cores, so losses and bytes are valid for GPUs too, but times aren't.
    """
    rows, jobs = [], []
    for strategy in ("single",) if ranks == 1 else SHARDED:
        job = Job(strategy=strategy, steps=20, timeout_s=300)
        try:
            job.check(ranks)
            jobs.append(job)
        except ValueError as error:
            rows.append({"strategy": strategy, STATUS: f"not here: {error}"})
    for row in measure_ranks(jobs, ranks):
        rows.append({name: row[name] for name in ("strategy", "step_ms", *HELD)} | {"last_loss": row["losses"][-1]})
    return rows


@distributed.numbers()
def _(rows: pd.DataFrame) -> SimpleNamespace:
    """What each of the most ranks holds by strategy, and how far the losses are from those of one process."""
    alone = pick(rows, "last_loss", strategy="single")
    apart = (rows["last_loss"] - float(alone)).abs().max()
    most = rows[rows["ranks"] == rows["ranks"].max()].set_index("strategy")[list(HELD)].sum(axis=1) / MIB
    return SimpleNamespace(
        ranks=derived(rows["ranks"].max(), "counted", "", 0),
        held={name: Number(most.get(name, math.nan), "MiB", missing=name) for name in SHARDED},
        apart=Number(max(apart, 1e-6)) if alone.measured else alone,
    )
