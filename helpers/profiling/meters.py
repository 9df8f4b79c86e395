"""Clocks whose marks are taken without waiting and read later, and a count of the bytes saved for backward.

On CUDA a mark is an event that the device passes when it has finished the work queued before it. It can be read once
the device has passed it. Recording an event costs the host about 2 µs, making one somewhat more.
"""

import time
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

_autograd: Any = torch._C._autograd  # whose stubs lack what is asked of it here


class HostClock:
    """The host's clock, for work on the CPU."""

    mark = staticmethod(time.perf_counter_ns)

    def wait(self) -> None:
        pass

    def read(self, marks: Sequence[int]) -> np.ndarray:
        """Integer nanoseconds since the first of the marks."""
        return np.array(marks, np.int64) - marks[0]


class DeviceClock:
    """The clock of a CUDA device, read through events on whichever stream is current. Nothing waits until `wait`."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def mark(self) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def wait(self) -> None:
        torch.cuda.synchronize(self._device)

    def read(self, marks: Sequence[torch.cuda.Event]) -> np.ndarray:
        """Integer nanoseconds since the first of the marks, which must be done, and in the order they were taken.

        A mark on another stream that the device passed before the preceding mark gets that one's time. The driver
        returns differences in fp32 milliseconds, which are exact to a microsecond for some seconds only.
        """
        since_ms = [0.0, *(marks[0].elapsed_time(mark) for mark in marks[1:])]
        return np.maximum.accumulate(np.rint(np.array(since_ms) * 1e6).astype(np.int64))


class SavedBytes:
    """Bytes that autograd saves for backward, by saved-tensor hooks between `open` and `close`.

    Each storage counts once and in full, for the call that saved it first; storages of `without` don't count. Hooks
    that the model sets inside, as activation checkpointing does, take precedence, and what they save isn't counted.
    """

    def __init__(self, without: Iterable[Tensor], modules: int) -> None:
        self.total_bytes = 0
        self.module_bytes = np.zeros(modules)  # for each module and what it calls
        self._without = {_storage(tensor)[0] for tensor in without}
        self._saved: dict[int, Tensor] = {}  # by address, which isn't reused while this holds the tensor
        self._hooks: saved_tensors_hooks | None = None
        self._running: Sequence[Any] = []

    def open(self, running: Sequence[Any]) -> None:
        """Begin to count; the caller keeps in `running` the step and the modules that run, each with its `module`."""
        # A private query: hooks can't be entered where torch.autograd.graph.disable_saved_tensors_hooks is in force.
        if self._hooks is None and _autograd._saved_tensors_hooks_is_enabled():
            self._running = running
            self._hooks = saved_tensors_hooks(self._pack, lambda tensor: tensor)
            self._hooks.__enter__()

    def close(self) -> None:
        if self._hooks is not None:
            self._hooks.__exit__()
        self._hooks = None
        self._saved.clear()

    def _pack(self, tensor: Tensor) -> Tensor:
        address, size = _storage(tensor)
        if address not in self._without and address not in self._saved:
            self._saved[address] = tensor
            self.total_bytes += size
            self.module_bytes[list({span.module for span in self._running[1:]})] += size
        return tensor


def _storage(tensor: Tensor) -> tuple[int, int]:
    """Address and bytes of a tensor's storage; (-1, 0) for a tensor without one (sparse)."""
    try:
        storage = tensor.untyped_storage()
        return storage.data_ptr(), storage.nbytes()
    except (NotImplementedError, RuntimeError):
        return -1, 0
