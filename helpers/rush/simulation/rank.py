"""SIMULATION: one rank of many, alone, on a machine with one GPU or none; and the memory that it takes.

The code that runs is that of training; the other ranks don't exist. A fake process group's collectives return at once
and move nothing, so values are nonsense, while shapes, shards, the order of operations and of collectives are those of
a real cluster.

What is allocated, and when, is as on a real cluster, too, but for the buffers that NCCL keeps for itself, outside
torch's count (some 100 MiB to a few GiB). On CUDA the allocator's peak is measured, and the time of a step, which is
that of the computation alone. On the CPU the same code runs on tensors without memory, and a `Ledger` counts what they
would take; the scratch space of kernels (cuBLAS: 32 MiB and more) is not in it.
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

from helpers.lab.machine import device as this_device
from helpers.lab.memory import GIB
from helpers.lab.timing import Timing, each
from helpers.rush.distributed import Job, strategies
from helpers.rush.distributed.training import Batches, micro_batches, optimizer_of, state_bytes, train_step

BLOCK = 512  # bytes: the CUDA allocator hands out multiples of it
# The method by which DTensor learns the shape of a result, by its name in torch 2.11 and 2.13.
INFERS = "_propagate_tensor_meta_non_cached"

Rank = tuple[nn.Module, Optimizer, Batches]


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
    with real(job, ranks, device) as (model, optimizer, batches):
        train_step(job, model, optimizer, batches)
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


class Ledger(TorchDispatchMode):
    """Counts the bytes that tensors hold, as a caching allocator would, without there being any memory.

    Each storage is counted once, from the operation that makes it until nothing holds it. It sees every operation,
    some 20 µs for each; under `FakeTensorMode` nothing is computed and nothing allocated: the 8B model is counted on a
    laptop.
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
        # FSDP frees what it gathered by resizing the storage to nothing, which is no operation on tensors.
        def resize_(storage: torch.UntypedStorage, size: int) -> None:
            self._resize(storage, size)
            if storage._cdata in self._sizes:
                self._set(storage._cdata, storage.nbytes())

        # DTensor tries operations on tensors of the global shapes, to learn the shape of what comes out: in training,
        # too, those have no memory.
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
            return NotImplemented  # DTensor goes first, and its operations on local tensors come here
        result = function(*args, **(kwargs or {}))
        if self._inferring:
            return result
        for leaf in tree_leaves(result):
            if isinstance(leaf, torch.Tensor):
                self._see(leaf.untyped_storage())
        return result

    def _see(self, storage: torch.UntypedStorage) -> None:
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
