"""Measuring: timing, paired trials, memory, ceilings, the machine.

from helpers.lab import bench, compare, peak_memory, saved_bytes
"""

from typing import Any

from ..boot import when_used

Row = dict[str, Any]  # what a measurement returns: its configuration, and what was measured
STATUS = "status"  # the column of a row that says "ok", or why there are no figures

NAMES = {
    "cpu": "keep_pages",
    "machine": "DeviceError device environment half_dtype missing_because multiplies_half",
    "memory": "Memory peak_memory saved_bytes",
    "process": "in_fresh_process",
    "timing": "Comparison Disagreement Timing bench compare each phases",
}
__all__ = ["STATUS", "Row", *" ".join(NAMES.values()).split()]
__getattr__ = when_used(__name__, NAMES)
