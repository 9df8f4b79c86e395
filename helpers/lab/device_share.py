"""How busy a GPU is while work is timed: its time in kernels and copies, as a share of the time that is reported.

A row whose share is below `LEAST` is host-bound: its time is Python's and the driver's, and says nothing of a kernel.
"""

import functools
import os
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch

from .machine import device

DEVICE_SHARE = "device_share"
LEAST, HOST_BOUND = 0.9, "‡"  # and the mark of a row that is below, in tables
SLEEP = "spin_kernel"  # of `queue_ahead`


def device_share(run: Callable[[], Any], median_ms: float) -> dict[str, float]:
    """The device's time in one profiled call of `run` over the median of unprofiled ones, as a column of a row.

    Without the column on a CPU, and where the profiler shows no kernels. Costs one call and some 20 ms, in a process's
    first call a second. Captured graphs show the kernels that they replay.
    """
    return as_column(share(busy_ms(run), median_ms))


def host_bound(row: Any) -> bool:
    """Whether the device did nothing in more than a tenth of a row's time; a row without a share isn't known to be."""
    share = row.get(DEVICE_SHARE)
    return share is not None and share < LEAST


def as_column(share: float | None) -> dict[str, float]:
    return {} if share is None else {DEVICE_SHARE: share}


def share(device_ms: float | None, median_ms: float) -> float | None:
    return device_ms / median_ms if device_ms is not None and median_ms else None


def busy_phases(step: Callable[[], Iterator[str]], names: Iterable[str]) -> dict[str, float | None]:
    """The milliseconds of `busy_ms` of each phase of a step, a generator function that yields at their ends."""
    if device().type != "cuda":
        return dict.fromkeys(names)
    running = step()
    busy = {name: busy_ms(lambda: next(running)) for name in names}
    for _ in running:  # what follows the last phase
        pass
    return busy


def busy_ms(run: Callable[[], Any], before: Callable[[], Any] = lambda: None) -> float | None:
    """Milliseconds of a call in which the device computes or copies; None on a CPU, or if no kernels are seen.

    `before()` runs before, and doesn't count, nor does the kernel that only waits for the host.
    """
    if device().type != "cuda":
        return None
    _warm_profiler()
    before()
    intervals = _profiled(run)
    return union(intervals) / 1e6 if intervals else None


def union(intervals: Iterable[tuple[int, int]]) -> int:
    """The length of the union of intervals (start, end): kernels that run at the same time count once."""
    total, reached = 0, 0
    for start, end in sorted(intervals):
        total += max(end - max(start, reached), 0)
        reached = max(reached, end)
    return total


@functools.cache
def _warm_profiler() -> None:
    """The first profile of a process loads the driver's part, which takes a second."""
    os.environ.setdefault("KINETO_LOG_LEVEL", "6")  # else some builds of torch print two lines a profile
    _profiled(lambda: torch.zeros(1, device=device()))


def _profiled(run: Callable[[], Any]) -> list[tuple[int, int]]:
    """Start and end, in ns, of the kernels, copies and fills of a call."""
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        run()
        torch.cuda.synchronize()
    return intervals_of(profile.profiler.kineto_results.events())


def intervals_of(events: Iterable[Any]) -> list[tuple[int, int]]:
    """Start and end of the device's events; the profiler's own list, as to make `FunctionEvent`s takes seconds."""
    return [
        (event.start_ns(), event.start_ns() + event.duration_ns())
        for event in events
        if event.device_type() == torch.autograd.DeviceType.CUDA
        and not event.is_user_annotation()
        and SLEEP not in event.name()
    ]
