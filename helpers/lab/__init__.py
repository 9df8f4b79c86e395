"""Measuring: timing, paired trials, memory, ceilings, the machine.

from helpers.lab import bench, compare, peak_memory, saved_bytes
"""

from ..boot import when_used

__all__ = [
    "Comparison",
    "DeviceError",
    "Disagreement",
    "Memory",
    "Timing",
    "bench",
    "compare",
    "device",
    "each",
    "environment",
    "half_dtype",
    "in_fresh_process",
    "keep_pages",
    "multiplies_half",
    "peak_memory",
    "phases",
    "saved_bytes",
]

__getattr__ = when_used(
    __name__,
    {
        "cpu": "keep_pages",
        "machine": "DeviceError device environment half_dtype multiplies_half",
        "memory": "Memory peak_memory saved_bytes",
        "process": "in_fresh_process",
        "timing": "Comparison Disagreement Timing bench compare each phases",
    },
)
