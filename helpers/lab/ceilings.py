"""This machine's upper limits, measured: the rate of a large matrix product and the bandwidth of a large copy.

The data are random: a GPU multiplies zeros faster.
"""

import torch

from .machine import device, device_class
from .timing import Timing, bench


def matmul(size: int, dtype: torch.dtype) -> tuple[Timing, float]:
    """Time of a square product and its rate in TFLOP/s, counting 2·size³ operations."""
    left, right = (torch.randn(size, size, device=device()).to(dtype) for _ in range(2))
    out = torch.empty_like(left)
    timing = bench(lambda: torch.mm(left, right, out=out))
    return timing, 2 * size**3 / timing.median_ms / 1e9


def large_copy(on_cpu: int) -> int:
    """MiB of a copy whose bandwidth is that of memory, not of a cache: on a CPU as given, on a GPU less than it has."""
    return {"cpu": on_cpu, "gpu": 1024, "big-gpu": 4096}[device_class()]


def copy(mib: int) -> tuple[Timing, float]:
    """Time of a copy of `mib` MiB on the device, and its GB/s, counting bytes read and bytes written."""
    elements = mib * 2**20 // 4
    source, target = torch.randn(elements, device=device()), torch.empty(elements, device=device())
    timing = bench(lambda: target.copy_(source))
    return timing, 2 * 4 * elements / timing.median_ms / 1e6
