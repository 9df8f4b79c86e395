"""Measuring: timing, paired trials, memory, ceilings, the machine.

from helpers.lab import bench, compare, peak_memory, saved_bytes
"""

from typing import Any

from ..boot import when_used

__all__ = [
    "STATUS",
    "Comparison",
    "DeviceError",
    "Disagreement",
    "Memory",
    "Row",
    "Timing",
    "bench",
    "compare",
    "device",
    "each",
    "environment",
    "half_dtype",
    "in_fresh_process",
    "keep_pages",
    "missing_because",
    "multiplies_half",
    "peak_memory",
    "phases",
    "saved_bytes",
]

Row = dict[str, Any]  # what a measurement returns: its configuration, and what was measured
STATUS = "status"  # the column of a row that says "ok", or why there are no figures

__getattr__ = when_used(
    __name__,
    {
        "cpu": "keep_pages",
        "machine": "DeviceError device environment half_dtype missing_because multiplies_half",
        "memory": "Memory peak_memory saved_bytes",
        "process": "in_fresh_process",
        "timing": "Comparison Disagreement Timing bench compare each phases",
    },
)
