"""One training loop on many real ranks by DDP, ZeRO-2 or ZeRO-3, on GPUs (nccl) or CPUs (gloo).

measure([Job(strategy="ddp"), Job(strategy="zero3")], ranks=2)
"""

from collections.abc import Sequence
from typing import Any

from .launch import RankFailed, joined, launch
from .strategies import Job
from .training import train

__all__ = ["Job", "RankFailed", "joined", "launch", "measure", "train"]


def measure(jobs: Sequence[Job], ranks: int) -> list[dict[str, Any]]:
    """A row for each job, run one after another on the same `ranks` new processes of this machine.

    All jobs are checked before a process starts. They share one process group, so their backends must be the same.
    """
    for job in jobs:
        job.check(ranks)
    if len({job.backend for job in jobs}) > 1:
        raise ValueError("jobs that share ranks must have one backend; measure those of each apart")
    return launch(work, ranks, list(jobs))[0]


def work(jobs: Sequence[Job]) -> list[dict[str, Any]]:
    """The work of one rank: join the process group and train each job."""
    with joined(jobs[0].backend, jobs[0].timeout_s) as device:
        return [train(job, device) for job in jobs]
