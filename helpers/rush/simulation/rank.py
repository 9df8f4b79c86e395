"""SIMULATION: one rank of many, alone. The code that runs is that of training; the other ranks don't exist.

A fake process group's collectives return at once and move nothing, so values are nonsense, while shapes, shards, the
order of operations and of collectives are those of a real cluster.
"""

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from helpers.rush.distributed import strategies
from helpers.rush.distributed.strategies import Job
from helpers.rush.distributed.training import Batches, micro_batches, optimizer_of

Rank = tuple[nn.Module, Optimizer, Batches]


@contextlib.contextmanager
def fake_group(ranks: int) -> Iterator[None]:
    """Inside, this process is rank 0 of `ranks`."""
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
    """The rank with real tensors on a device: model, optimizer, and a step's batches."""
    with fake_group(ranks):
        yield _rank(job, ranks, device, init_device_mesh(device.type, (ranks,)), "meta")


@contextlib.contextmanager
def weightless(job: Job, ranks: int, watch: contextlib.AbstractContextManager) -> Iterator[Rank]:
    """The rank with tensors that have shapes and no memory: nothing is computed, so a model of any size runs anywhere.

    `watch` sees all that is done, from the first weight on. DDP does one step only: after its first it sends the order
    of its buckets, which takes real numbers.
    """
    import torch.distributed._tools.fake_collectives  # teaches torch the collectives of such tensors

    if job.strategy == "ddp" and job.sync_each and job.accumulate > 1:
        raise ValueError("ddp with sync_each and accumulate above 1 needs real tensors, for DDP sends real numbers")

    with fake_group(ranks):
        mesh = init_device_mesh("cpu", (ranks,))
        with FakeTensorMode(), watch:
            yield _rank(job, ranks, torch.device("cpu"), mesh, None)


def _rank(job: Job, ranks: int, device: torch.device, mesh: Any, lay_out_on: str | None) -> Rank:
    model = strategies.build(job, device, mesh, lay_out_on=lay_out_on)
    if isinstance(model, DistributedDataParallel):
        model.register_comm_hook(None, _all_reduce)
    return model, optimizer_of(job, model), micro_batches(job, 0, 0, ranks, device)


def _all_reduce(_state: None, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """What DDP does with a bucket, in Python: its own code wants a result, of which a fake group gives none."""
    gradients = bucket.buffer()
    dist.all_reduce(gradients)
    done = torch.futures.Future(devices=[gradients.device] if gradients.is_cuda else [])
    done.set_result(gradients)
    return done
