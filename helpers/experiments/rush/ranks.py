"""Many ranks: the same training by each strategy, and their memory, counted."""

from typing import Any

from ...distributed import Job
from ...distributed import measure as measure_ranks
from ...fit import rank_memory
from ...lab import Worth, experiment
from ...lab.records import STATUS, Row

TINY, EIGHT_B = "tiny", "llama-3.1-8b"
SHARDED = ("ddp", "zero2", "zero3")
PLANNED: dict[str, Any] = {"precision": "amp-bf16", "checkpointing": "full"}


HELD = ["parameter_bytes", "gradient_bytes", "optimizer_bytes"]


@experiment(
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


@experiment(
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
