"""Memory of a call: the peak of allocated bytes, and the bytes of tensors saved for backward."""

import contextlib
import gc
import os
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch._C._profiler import _EventType
from torch.autograd.graph import saved_tensors_hooks
from torch.profiler import ProfilerActivity, profile
from torch.utils.data.dataloader import _MultiProcessingDataLoaderIter

from .machine import device

GIB, MIB = 2**30, 2**20
OUT_OF_MEMORY = "out of memory"  # the status of a row


@dataclass(frozen=True)
class Memory:
    """Bytes allocated before a call, at its peak, and after it while its result is still referenced.

    The CPU's allocator keeps no total: on the CPU only the blocks that the call itself allocates count, `before_bytes`
    is 0, and an older block that the call frees doesn't lower the others.
    """

    before_bytes: int
    peak_bytes: int
    after_bytes: int

    @property
    def peak_gib(self) -> float:
        return self.peak_bytes / GIB

    @property
    def added_bytes(self) -> int:
        """What the call needs on top of what was allocated before."""
        return self.peak_bytes - self.before_bytes

    @property
    def kept_bytes(self) -> int:
        """What the call's result keeps allocated: itself and the tensors saved for its backward."""
        return self.after_bytes - self.before_bytes


PEAK, RESIDENT, AVAILABLE = "self/status VmHWM", "self/status VmRSS", "meminfo MemAvailable"


def system_bytes(field: str) -> int:
    """What Linux tells of memory: the most that this process has held, what it holds, what is available; 0 elsewhere.

    The peak is not `ru_maxrss` of getrusage, which begins with that of the process that started this one.
    """
    file, name = field.split()
    with contextlib.suppress(OSError):
        return int(re.search(rf"{name}:\s+(\d+)", Path("/proc", file).read_text())[1]) * 1024
    return 0


class PeakAbove:
    """How far memory rises in a block above what was allocated when it began: `gib`, known at its end.

    On a GPU the allocated bytes: what a process kept from earlier work isn't in it. Garbage is collected first, for a
    trainer refers to itself and would else be freed within the block. On a CPU it is the peak of resident memory over
    the earlier peak, which is the block's need only in a process of its own.
    """

    gib: float

    def __enter__(self) -> "PeakAbove":
        self._on_gpu = device().type == "cuda"
        if self._on_gpu:
            gc.collect()
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
        self._before = torch.cuda.memory_allocated() if self._on_gpu else system_bytes(PEAK)
        return self

    def __exit__(self, *error: object) -> None:
        after = torch.cuda.max_memory_allocated() if self._on_gpu else system_bytes(PEAK)
        self.gib = (after - self._before) / GIB


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error says that the device or the host is out of memory."""
    message = str(error).lower()
    return isinstance(error, (torch.OutOfMemoryError, MemoryError)) or (
        isinstance(error, RuntimeError)
        and any(words in message for words in ("out of memory", "can't allocate memory", "alloc_failed"))
    )


def end_loader_workers() -> None:
    """End the workers of all DataLoaders in this process.

    Where an iterator is garbage of a cycle, Python closes its queues first, and each worker is waited for in vain for
    five seconds, whenever that garbage is collected.
    """
    for iterator in [each for each in gc.get_objects() if type(each) is _MultiProcessingDataLoaderIter]:
        iterator._shutdown_workers()


def free_memory() -> None:
    """Free the last configuration's memory, so that all configurations start from the same state.

    Loaders' workers end first: each would be waited for in vain for five seconds where its loader is garbage. This
    includes cuBLAS's workspaces, which count as allocated: CUDA graphs captured before must not be replayed after.
    """
    end_loader_workers()
    gc.collect()
    if device().type == "cuda":
        if hasattr(torch._C, "_cuda_clearCublasWorkspaces"):  # torch has no public function for it
            torch._C._cuda_clearCublasWorkspaces()
        torch.cuda.empty_cache()


def peak_memory(fn: Callable[[], Any]) -> Memory:
    """The peak of allocated bytes on `device()` while `fn()` runs, after a reset.

    On CUDA from the caching allocator's statistics: exact, in 512-byte blocks, at no cost. On the CPU from the
    profiler's allocation events, of the call's own blocks: what it needs is at most that, and less by as much as it
    frees of older blocks first. There `fn` runs slower, so don't time it in the same call, and another profiler
    must not be running: torch has one at a time, whose events would be lost.
    """
    if device().type == "cuda":
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        result = fn()
        torch.cuda.synchronize()
        memory = Memory(before, torch.cuda.max_memory_allocated(), torch.cuda.memory_allocated())
        del result
        return memory
    return _memory_on_cpu(fn)


def saved_bytes(fn: Callable[[], Any], *, without: Iterable[torch.Tensor] = ()) -> int:
    """The bytes of the tensors that autograd saves for backward while `fn()` runs, each storage counted once.

    Storages of the tensors in `without` don't count: pass `model.parameters()`, which exist anyway. If only a view is
    saved, its full storage counts, for all of it stays allocated.
    """
    known = {tensor.untyped_storage().data_ptr() for tensor in without}
    saved: dict[int, torch.UntypedStorage] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in known:
            saved[storage.data_ptr()] = storage  # referenced, so that its address isn't reused
        return tensor

    with saved_tensors_hooks(pack, lambda tensor: tensor):
        result = fn()
    del result
    return sum(storage.nbytes() for storage in saved.values())


def _memory_on_cpu(fn: Callable[[], Any]) -> Memory:
    if torch.autograd._profiler_enabled():
        raise RuntimeError("peak_memory uses torch's profiler on the CPU, and one is running: call it outside")
    os.environ.setdefault("KINETO_LOG_LEVEL", "6")  # some builds of torch print a line when a profiler starts or stops
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        result = fn()
    del result
    events = _allocations(profiler.profiler.kineto_results.experimental_event_tree())
    blocks: dict[int, int] = {}  # address -> bytes
    allocated = peak = 0
    for _, address, size in sorted(events, key=lambda event: event[0]):
        if size > 0:
            blocks[address] = size
            allocated += size
            peak = max(peak, allocated)
        else:
            # torch knows an older block's size only if it was allocated in another profile: it never counts
            allocated -= blocks.pop(address, 0)
    return Memory(0, peak, allocated)


def _allocations(events: Iterable[Any]) -> Iterator[tuple[int, int, int]]:
    """Time, address and bytes of each allocation on the CPU; bytes are negative where it is freed."""
    todo = list(events)
    while todo:
        event = todo.pop()
        todo += event.children
        kind, fields = event.typed
        if kind == _EventType.Allocation and fields.device.type == "cpu":
            yield event.start_time_ns, fields.ptr, fields.alloc_size
