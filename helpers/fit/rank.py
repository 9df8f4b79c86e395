"""SIMULATION: memory of one device, and of one rank of many without the other ranks, with one GPU or none.

`count` runs the `Trainer` of one device on fake tensors. A rank runs the training code in a fake process group, whose
collectives return at once and move nothing: values are meaningless, but shapes, shards and the order of operations and
collectives are those of a real cluster.

Allocations are those of a real cluster too, except for NCCL's own buffers, which torch doesn't count (some 100 MiB to a
few GiB). On CUDA the allocator's peak is measured, and the time of a step without communication. On the CPU the same
code runs on fake tensors, and a `Ledger` counts the bytes they would take; kernels' workspaces (cuBLAS: 32 MiB and
more) are not counted.
"""

import contextlib
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from ..distributed import Job, strategies
from ..distributed.training import Batches, micro_batches, optimizer_of, state_bytes, train_step
from ..lab.machine import device as this_device
from ..lab.memory import GIB, peak_memory
from ..lab.timing import Timing, each
from ..models.llama import preset
from ..rush import Setup, Trainer
from .ledger import Ledger, Peak, deepened, split_step

Rank = tuple[nn.Module, Optimizer, Batches]


def count(setup: Setup) -> Peak:
    """The peak of a training step of an uncompiled setup, after the first, by part. It takes a second."""
    if setup.compile != "none":
        raise ValueError(f"compile is {setup.compile!r}; what a compiler saves isn't counted: take 'none'")
    layers = setup.layers or preset(setup.model)["layers"]
    return deepened(lambda layers: counted(replace(setup, layers=layers)), layers)


def counted(setup: Setup) -> list[Peak]:
    """The peaks of a step's phases, with all layers of the setup."""
    ledger = Ledger(setup.batch * setup.sequence)
    with FakeTensorMode(), ledger:
        trainer = Trainer(setup, torch.device("cpu"))
        tokens = torch.zeros(setup.batch, setup.sequence + 1, dtype=torch.long)
        for weight in trainer.model.parameters():
            weight.register_post_accumulate_grad_hook(lambda weight: ledger.name("gradients", [weight.grad]))
        split_step(ledger, trainer.model.layers, trainer.optimizer)
        ledger.begin_step(trainer.model, trainer.optimizer, [tokens])
        trainer.step(tokens)
    return ledger.peaks


def rank_memory(job: Job, ranks: int, *, count: bool | None = None) -> dict[str, Any]:
    """State and peak memory of a rank of `ranks` in a step after the first (which creates optimizer state), as a row.

    `job.batch` is that of all ranks, as in training; `job.backend` is ignored. `how` is "measured" or "counted": on a
    GPU the peak is measured and `job.steps` steps are timed, unless `count=True`; on a CPU only with `count=False`.
    """
    job.check(ranks)
    count = this_device().type != "cuda" if count is None else count
    if count:
        ledger, state = count_rank(job, ranks)
        measured = _row("counted", state, ledger.peak.bytes)
    else:
        measured = _measured(job, ranks)
    return {
        "simulated": True,
        "strategy": job.strategy,
        "ranks": ranks,
        "model": job.model,
        "batch_per_rank": job.batch // job.data_ranks(ranks),
        "sequence": job.sequence,
        "precision": job.precision,
        "checkpointing": job.checkpointing,
    } | measured


def _measured(job: Job, ranks: int) -> dict[str, Any]:
    device = this_device()
    with real(job, ranks, device) as (model, optimizer, batches):
        train_step(job, model, optimizer, batches)
        if device.type == "cpu":  # its peak counts from a call's start, so what is allocated before is added
            state = state_bytes(model, optimizer)
            optimizer.zero_grad()
            added = peak_memory(lambda: train_step(job, model, optimizer, batches)).added_bytes
            return _row("measured", state, state["parameter_bytes"] + state["optimizer_bytes"] + added)
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        timing = Timing.of(each(range(job.steps), lambda _: train_step(job, model, optimizer, batches)))
        row = _row("measured", state_bytes(model, optimizer), torch.cuda.max_memory_allocated())
    return row | {"compute_ms": timing.median_ms, "p20_ms": timing.p20_ms, "p80_ms": timing.p80_ms, "n": timing.n}


def rank_peak(job: Job, ranks: int) -> Peak:
    """The peak of a rank by part, counted with few layers; `rank_memory` counts all of them."""
    job.check(ranks)
    layers = job.layers or preset(job.model)["layers"]
    return deepened(lambda layers: count_rank(replace(job, layers=layers), ranks)[0].peaks, layers)


def count_rank(job: Job, ranks: int) -> tuple[Ledger, dict[str, int]]:
    """The ledger of a rank's second step, and the bytes of its state."""
    ledger = Ledger(job.batch // job.data_ranks(ranks) * job.sequence // job.accumulate)
    with weightless(job, ranks, ledger) as (model, optimizer, batches):
        plain = getattr(model, "module", model)
        ledger.name_flat("gradients")  # before the first step only DDP has flat tensors, its buckets
        train_step(job, plain, optimizer, batches)
        ledger.learn(plain, optimizer, [tensor for batch in batches for tensor in batch])
        optimizer.zero_grad()
        split_step(ledger, plain.layers, optimizer)
        ledger.begin_phase(first=True)
        train_step(job, model, optimizer, batches)
        return ledger, state_bytes(model, optimizer)


def _row(how: str, state: dict[str, int], peak_bytes: int) -> dict[str, Any]:
    states = {name.replace("_bytes", "_gib"): size / GIB for name, size in state.items()}
    return {"how": how, "peak_gib": peak_bytes / GIB} | states


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
    """The rank with real tensors on a device: model, optimizer, and a step's batches."""
    with fake_group(ranks):
        yield _rank(job, ranks, device, init_device_mesh(device.type, (ranks,)), "meta")


@contextlib.contextmanager
def weightless(job: Job, ranks: int, watch: contextlib.AbstractContextManager) -> Iterator[Rank]:
    """The rank with fake tensors: nothing is computed or allocated, so a model of any size runs on any machine.

    All operations run within `watch`, from the creation of the weights on. DDP can do only one step: after the first it
    broadcasts the order of its buckets, which needs real values.
    """
    import torch.distributed._tools.fake_collectives  # registers collectives for fake tensors

    with fake_group(ranks):
        mesh = init_device_mesh("cpu", (ranks,))
        with FakeTensorMode(), watch:
            yield _rank(job, ranks, torch.device("cpu"), mesh, None)


def _rank(job: Job, ranks: int, device: torch.device, mesh: Any, lay_out_on: str | None) -> Rank:
    model = strategies.build_model(job, device, mesh, lay_out_on=lay_out_on)
    if isinstance(model, DistributedDataParallel):
        model.register_comm_hook(None, _all_reduce)
    return model, optimizer_of(job, model), micro_batches(job, 0, 0, ranks, device)


def _all_reduce(_state: None, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """DDP's reduction of a bucket, in Python: its C++ code needs a result, which a fake group doesn't return."""
    gradients = bucket.buffer()
    dist.all_reduce(gradients)
    done = torch.futures.Future(devices=[gradients.device] if gradients.is_cuda else [])
    done.set_result(gradients)
    return done
