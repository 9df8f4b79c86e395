"""SIMULATION: memory of one rank of many without the other ranks, with one GPU or none.

A rank runs the training code in a fake process group, whose collectives return at once and move nothing: values are
meaningless, but shapes, shards and the order of operations and collectives are those of a real cluster.

Allocations are those of a real cluster too, except for NCCL's own buffers, which torch doesn't count (some 100 MiB to a
few GiB). On CUDA the allocator's peak is measured. On the CPU the same code runs on fake tensors, and a `Ledger` counts
the bytes they would take; kernels' workspaces (cuBLAS: 32 MiB and more) are not counted.
"""

import contextlib
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel

from ..distributed import Job
from ..distributed.training import Trainer, build_trainer, tokens_of
from ..lab.machine import device as this_device
from ..lab.machine import missing_because
from ..lab.memory import GIB, peak_memory
from ..models.llama import preset
from .ledger import Ledger, Peak, deepened, split_step

Rank = tuple[Trainer, Tensor]  # with the tokens of a step


def rank_memory(job: Job, ranks: int, *, count: bool = False) -> float:
    """The peak memory, in GiB, of a rank of `ranks` in a step after the first, which creates optimizer state.

    `job.batch` is that of all ranks, as in training; `job.backend` is ignored. On a GPU the peak is measured, unless
    `count=True`; on a CPU it is counted.
    """
    job.check(ranks)
    counts = count or this_device().type != "cuda"
    return (count_rank(job, ranks).peak.bytes if counts else _measured(job, ranks)) / GIB


def _measured(job: Job, ranks: int) -> int:
    device = this_device()
    with real(job, ranks, device) as (trainer, tokens):
        trainer.step(tokens)
        trainer.optimizer.zero_grad()
        return peak_memory(lambda: trainer.step(tokens)).peak_bytes


def rank_peak(job: Job, ranks: int) -> Peak:
    """The peak of a rank by part, counted with few layers; `rank_memory` counts all of them."""
    job.check(ranks)
    layers = job.layers or preset(job.model)["layers"]
    return deepened(lambda layers: count_rank(replace(job, layers=layers), ranks).peaks, layers)


def count_rank(job: Job, ranks: int) -> Ledger:
    """The ledger of a rank's second step."""
    ledger = Ledger(job.batch // ranks * job.sequence // job.accumulate)
    with weightless(job, ranks, ledger) as (trainer, tokens):
        plain = getattr(trainer.model, "module", trainer.model)
        ledger.name_flat("gradients")  # before the first step only DDP has flat tensors, its buckets
        split_step(ledger, plain, trainer.optimizer)
        ledger.begin_step(plain, trainer.optimizer, [tokens])
        trainer.step(tokens)
    return ledger


@contextlib.contextmanager
def fake_group(ranks: int) -> Iterator[None]:
    """A context in which this process is rank 0 of `ranks`, in torch's fake process group."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    if dist.is_initialized():
        raise ValueError("this process is in a process group already; leave it (destroy_process_group) to simulate one")
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=ranks)
    try:
        yield
    finally:
        dist.destroy_process_group()


@contextlib.contextmanager
def real(job: Job, ranks: int, device: torch.device) -> Iterator[Rank]:
    """The rank with real tensors on a device: its trainer, and a step's tokens."""
    with fake_group(ranks):
        yield _rank(job, ranks, device, init_device_mesh(device.type, (ranks,)), "meta")


@contextlib.contextmanager
def weightless(job: Job, ranks: int, watch: contextlib.AbstractContextManager) -> Iterator[Rank]:
    """The rank with fake tensors: nothing is computed or allocated, so a model of any size runs on any machine.

    All operations run within `watch`, from the creation of the weights on. DDP can do only one step: after the first it
    broadcasts the order of its buckets, which needs real values.
    """
    if reason := missing_because("torch 2.9"):
        raise ValueError(f"counting the memory of ranks {reason}")
    import torch.distributed._tools.fake_collectives  # registers collectives for fake tensors

    with fake_group(ranks):
        mesh = init_device_mesh("cpu", (ranks,))
        with FakeTensorMode(), watch:
            yield _rank(job, ranks, torch.device("cpu"), mesh, None)


def _rank(job: Job, ranks: int, device: torch.device, mesh: Any, lay_out_on: str | None) -> Rank:
    trainer = build_trainer(job, device, mesh, lay_out_on=lay_out_on)
    if isinstance(trainer.model, DistributedDataParallel):
        trainer.model.register_comm_hook(None, _all_reduce)
    return trainer, tokens_of(job, 0, 0, ranks, device)


def _all_reduce(_state: None, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """DDP's reduction of a bucket, in Python: its C++ code needs a result, which a fake group doesn't return."""
    gradients = bucket.buffer()
    dist.all_reduce(gradients)
    done = torch.futures.Future(devices=[gradients.device] if gradients.is_cuda else [])
    done.set_result(gradients)
    return done
