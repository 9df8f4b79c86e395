"""Memory of a call: the peak of allocated bytes, and the bytes of tensors saved for backward."""

import contextlib
import os
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.autograd.graph import saved_tensors_hooks
from torch.profiler import ProfilerActivity, profile

from .machine import device

GIB, MIB = 2**30, 2**20


@dataclass(frozen=True)
class Memory:
    """Bytes allocated before a call, at its peak, and after it while its result is still referenced.

    The CPU's allocator keeps no total, so on the CPU `before_bytes` is 0 and the others count from the call's start.
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


def peak_memory(fn: Callable[[], Any]) -> Memory:
    """The peak of allocated bytes on `device()` while `fn()` runs, after a reset.

    On CUDA from the caching allocator's statistics: exact, in 512-byte blocks, at no cost. On the CPU from the
    profiler's allocation events: exact, but `fn` runs slower, so don't time it in the same call.
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
    profiler = profile(activities=[ProfilerActivity.CPU], profile_memory=True)
    with _quiet():
        profiler.start()
    try:
        result = fn()
    finally:
        with _quiet():
            profiler.stop()
    del result
    events = [e for e in profiler.profiler.kineto_results.events() if e.name() == "[memory]"]
    allocated = peak = 0
    for event in sorted(events, key=lambda e: e.start_ns()):
        allocated += event.nbytes()
        peak = max(peak, allocated)
    return Memory(0, peak, allocated)


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Silence stderr: some builds of torch print a line from C++ whenever a profiler starts or stops."""
    sys.stderr.flush()
    stderr = os.dup(2)
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, 2)
    try:
        yield
    finally:
        os.dup2(stderr, 2)
        os.close(stderr)
        os.close(null)
