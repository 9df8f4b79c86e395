"""SIMULATION: the memory of one rank of many, on a machine with one GPU or none.

What is allocated, and when, is as on a real cluster, but for the buffers that NCCL keeps for itself, outside torch's
count (some 100 MiB to a few GiB). On CUDA the allocator's peak is measured, and the time of a step, which is that of
the computation alone. On the CPU the same code runs on tensors without memory, and a ledger counts what they would
take; the scratch space of kernels (cuBLAS: 32 MiB and more) is not in it.
"""

from typing import Any

import torch

from helpers.lab.machine import device as this_device
from helpers.lab.memory import GIB
from helpers.lab.timing import Timing, moment
from helpers.rush.distributed.strategies import Job
from helpers.rush.distributed.training import held, step_times, train_step

from . import rank
from .ledger import Ledger


def rank_memory(job: Job, ranks: int, *, count: bool | None = None) -> dict[str, Any]:
    """One row: what a rank of `ranks` holds and its peak, in any step but the first, which makes the optimizer's state.

    `job.batch` is of all ranks, as in training; `job.backend` doesn't matter. `how` says whether the peak was measured
    or counted: on a GPU it is measured, but for `count=True`, and `job.steps` steps are timed.
    """
    job.check(ranks)
    count = this_device().type != "cuda" if count is None else count
    return {
        "simulated": True,
        "strategy": job.strategy,
        "ranks": ranks,
        "model": job.model,
        "batch_per_rank": job.batch // job.data_ranks(ranks),
        "sequence": job.sequence,
        "precision": job.precision,
        "checkpointing": job.checkpointing,
    } | (_counted(job, ranks) if count else _measured(job, ranks))


def _measured(job: Job, ranks: int) -> dict[str, Any]:
    device = this_device()
    with rank.real(job, ranks, device) as (model, optimizer, batches):
        train_step(job, model, optimizer, batches)
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        marks = [moment()]
        for _ in range(job.steps):
            train_step(job, model, optimizer, batches)
            marks.append(moment())
        timing = Timing.of(step_times(marks, device))
        row = _row("measured", held(model, optimizer), torch.cuda.max_memory_allocated())
    return row | {"compute_ms": timing.median_ms, "p20_ms": timing.p20_ms, "p80_ms": timing.p80_ms, "n": timing.n}


def _counted(job: Job, ranks: int) -> dict[str, Any]:
    ledger = Ledger()
    with rank.weightless(job, ranks, ledger) as (model, optimizer, batches):
        train_step(job, getattr(model, "module", model), optimizer, batches)
        optimizer.zero_grad()
        ledger.reset_peak()
        train_step(job, model, optimizer, batches)
        return _row("counted", held(model, optimizer), ledger.peak_bytes)


def _row(how: str, held_bytes: dict[str, int], peak_bytes: int) -> dict[str, Any]:
    states = {name.replace("_bytes", "_gib"): size / GIB for name, size in held_bytes.items()}
    return {"how": how, "peak_gib": peak_bytes / GIB} | states
