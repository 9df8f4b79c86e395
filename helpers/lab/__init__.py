"""Measuring: timing, paired trials, memory, ceilings, the machine. In rooms of their own: records, report, checks.

    from helpers.lab import bench, compare, peak_memory, saved_bytes

Measuring needs torch, numpy, pandas and tqdm; `figures`, `notebook` and `report` need matplotlib and Jupyter too.
"""

from ..boot import when_used

__all__ = [
    "Comparison",
    "DeviceError",
    "Disagreement",
    "Experiment",
    "Memory",
    "Timing",
    "Worth",
    "bench",
    "checks",
    "compare",
    "device",
    "each",
    "environment",
    "figures",
    "half_dtype",
    "in_fresh_process",
    "keep_pages",
    "measure",
    "multiplies_half",
    "notebook",
    "peak_memory",
    "phases",
    "records",
    "report",
    "saved_bytes",
]

__getattr__ = when_used(
    __name__,
    {
        "checks": "",
        "cpu": "keep_pages",
        "machine": "DeviceError device environment half_dtype multiplies_half",
        "memory": "Memory peak_memory saved_bytes",
        "process": "in_fresh_process",
        "records": "",
        "records.experiment": "Experiment Worth",
        "records.runner": "measure",
        "report": "",
        "report.figures": "",
        "report.notebook": "",
        "timing": "Comparison Disagreement Timing bench compare each phases",
    },
)
