"""Measuring: timing, paired trials, memory, ceilings, the machine. In rooms of their own: records, report, checks.

    from helpers.lab import bench, compare, peak_memory, saved_bytes

Measuring needs torch, numpy, pandas and tqdm. `figures`, `notebook` and `report` need matplotlib and
Jupyter too, so they are loaded when they are first used.
"""

import importlib

from . import records
from .cpu import keep_pages
from .machine import DeviceError, device, environment, half_dtype, multiplies_half
from .memory import Memory, peak_memory, saved_bytes
from .process import in_fresh_process
from .records.experiment import Experiment, Worth, experiment
from .records.runner import measure
from .timing import Comparison, Disagreement, Timing, bench, compare, each, phases

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
    "experiment",
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

_LOADED_WHEN_USED = {"checks": "checks", "report": "report", "figures": "report.figures", "notebook": "report.notebook"}


def __getattr__(name: str):
    if name in _LOADED_WHEN_USED:
        return importlib.import_module(f"{__name__}.{_LOADED_WHEN_USED[name]}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
