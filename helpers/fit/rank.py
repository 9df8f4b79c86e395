"""SIMULATION: memory of one rank of many, without the other ranks, on a machine with one GPU or none.

It runs the training code in a fake process group, whose collectives return at once and move nothing: values are
meaningless, but shapes, shards and the order of operations and collectives are those of a real cluster.

Allocations are those of a real cluster too, except for NCCL's own buffers, which torch doesn't count (some 100 MiB to a
few GiB). On CUDA the allocator's peak is measured, and the time of a step without communication. On the CPU the same
code runs on fake tensors, and a `Ledger` counts the bytes they would take; kernels' workspaces (cuBLAS: 32 MiB and
more) are not counted.
"""

import contextlib
import weakref
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._sharding_prop import ShardingPropagator
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from helpers.distributed import Job, strategies
from helpers.distributed.training import Batches, micro_batches, optimizer_of, state_bytes, train_step
from helpers.lab.machine import device as this_device
from helpers.lab.memory import GIB, peak_memory
from helpers.lab.timing import Timing, each

BLOCK = 512  # bytes: the CUDA allocator's sizes are multiples of it
# The method by which DTensor infers a result's shape, as named in torch 2.11 and 2.13.
INFERS = "_propagate_tensor_meta_non_cached"

Rank = tuple[nn.Module, Optimizer, Batches]


def rank_memory(job: Job, ranks: int, *, count: bool | None = None) -> dict[str, Any]:
    """State and peak memory of a rank of `ranks` in a step after the first (which creates optimizer state), as a row.

    `job.batch` is that of all ranks, as in training; `job.backend` is ignored. `how` is "measured" or "counted": on a
    GPU the peak is measured and `job.steps` steps are timed, unless `count=True`; on a CPU only with `count=False`.
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


def _counted(job: Job, ranks: int) -> dict[str, Any]:
    ledger = Ledger()
    with weightless(job, ranks, ledger) as (model, optimizer, batches):
        train_step(job, getattr(model, "module", model), optimizer, batches)
        optimizer.zero_grad()
        ledger.reset_peak()
        train_step(job, model, optimizer, batches)
        return _row("counted", state_bytes(model, optimizer), ledger.peak_bytes)


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
    """DDP's reduction of a bucket, in Python: its C++ code needs a result, which a fake group doesn't return."""
    gradients = bucket.buffer()
    dist.all_reduce(gradients)
    done = torch.futures.Future(devices=[gradients.device] if gradients.is_cuda else [])
    done.set_result(gradients)
    return done


class Ledger(TorchDispatchMode):
    """Counts the bytes of all live tensor storages, in multiples of `BLOCK`, as the CUDA allocator would.

    Each storage is counted once, from the operation that creates it until it is freed. The cost is some 20 µs an
    operation. Under `FakeTensorMode` nothing is computed or allocated: the 8B model can be counted on a laptop.
    """

    # torch.distributed._tools.MemTracker counts the same to 0.01 %, but in 4 times the time, 8 % too much of tensor
    # parallelism, and without the allocator's blocks where there is no CUDA.

    def __init__(self) -> None:
        super().__init__()
        self.bytes = self.peak_bytes = 0
        self._sizes: dict[int, int] = {}  # by storage
        self._resize = torch.UntypedStorage.resize_
        self._infer = getattr(ShardingPropagator, INFERS)
        self._inferring = False

    def reset_peak(self) -> None:
        self.peak_bytes = self.bytes

    def __enter__(self) -> "Ledger":
        # FSDP frees gathered parameters by resizing their storage to 0, which `__torch_dispatch__` doesn't see.
        def resize_(storage: torch.UntypedStorage, size: int) -> None:
            self._resize(storage, size)
            if storage._cdata in self._sizes:
                self._set(storage._cdata, storage.nbytes())

        # DTensor infers result shapes by running operations on fake tensors of the global shapes; they must not count.
        def infer(*args: Any, **kwargs: Any) -> Any:
            self._inferring = True
            try:
                return self._infer(*args, **kwargs)
            finally:
                self._inferring = False

        torch.UntypedStorage.resize_ = resize_
        setattr(ShardingPropagator, INFERS, infer)
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        torch.UntypedStorage.resize_ = self._resize
        setattr(ShardingPropagator, INFERS, self._infer)
        super().__exit__(*error)

    def __torch_dispatch__(self, function: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # let DTensor dispatch; its operations on local tensors come back here
        result = function(*args, **(kwargs or {}))
        if self._inferring:
            return result
        for leaf in tree_leaves(result):
            if isinstance(leaf, torch.Tensor):
                self._count(leaf.untyped_storage())
        return result

    def _count(self, storage: torch.UntypedStorage) -> None:
        key = storage._cdata
        if key not in self._sizes:
            self._sizes[key] = 0
            self._set(key, storage.nbytes())
            weakref.finalize(storage, self._forget, key)

    def _set(self, key: int, size: int) -> None:
        rounded = -(-size // BLOCK) * BLOCK
        self.bytes += rounded - self._sizes[key]
        self._sizes[key] = rounded
        self.peak_bytes = max(self.peak_bytes, self.bytes)

    def _forget(self, key: int) -> None:
        self.bytes -= self._sizes.pop(key)
