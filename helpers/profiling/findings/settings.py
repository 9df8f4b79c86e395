"""cuDNN's settings. Every convolution carries them among its arguments, so a trace with shapes shows them.

Without shapes they are known only if they were noted while profiling:

    with profile(…) as prof:
        note_settings(prof)
"""

import json
from collections.abc import Iterator
from typing import Any

import torch

from ..events import KERNEL, Event, Trace
from ..places import by_place, places
from .finding import DETERMINISTIC, UNBENCHMARKED, Finding

KEY = "helpers.profiling settings"
MATTERS = 0.02  # of the kernels' time, for the convolutions of one place

# Where aten::_convolution has its flags: …, groups, benchmark, deterministic, cudnn_enabled, allow_tf32
_BENCHMARK, _DETERMINISTIC = 9, 10


def snapshot() -> dict[str, Any]:
    """The settings that decide which algorithm a convolution gets, as they are now."""
    return {
        "deterministic": torch.backends.cudnn.deterministic or torch.are_deterministic_algorithms_enabled(),
        "benchmark": torch.backends.cudnn.benchmark,
    }


def note_settings(profile: torch.profiler.profile) -> None:
    """Write `snapshot()` into the trace of a profile that is running."""
    profile.add_metadata_json(KEY, json.dumps(snapshot()))


def deterministic_convolutions(trace: Trace) -> Iterator[Finding]:
    """Deterministic algorithms are chosen from fewer, and slower ones, mostly for the backward pass."""
    held = [op for op in _convolutions(trace) if _flag(trace, op, _DETERMINISTIC, "deterministic")]
    for group in by_place(trace, held).values():
        yield Finding(
            DETERMINISTIC,
            places(trace, group),
            trace.per_step(len(group)),
            trace.ms(trace.both_ways([_recorded(op) for op in group])),
            "at most: these convolutions, forward and backward; what other algorithms take, no trace shows",
            "torch.backends.cudnn.deterministic = False, unless equal bits are the aim",
        )


def unbenchmarked_convolutions(trace: Trace) -> Iterator[Finding]:
    """Algorithms are guessed though sizes repeat, so that trying them out once would pay. Reported of a GPU only."""
    guessed = [
        op
        for op in _convolutions(trace)
        if trace.on_gpu
        and not _flag(trace, op, _BENCHMARK, "benchmark", unknown=True)
        and not _flag(trace, op, _DETERMINISTIC, "deterministic")
    ]
    kernels = trace.per_step(sum(e.us for e in trace.device if e.kind == KERNEL)) / 1e3
    for group in by_place(trace, guessed).values():
        cost = trace.ms(trace.both_ways([_recorded(op) for op in group]))
        sizes = {str(op.dims[:2]) for op in group}
        if cost < MATTERS * kernels or not group[0].dims or len(sizes) * len(trace.steps) > len(group):
            continue
        yield Finding(
            UNBENCHMARKED,
            places(trace, group),
            trace.per_step(len(group)),
            cost,
            "at most: these convolutions, forward and backward; what other algorithms take, no trace shows",
            "torch.backends.cudnn.benchmark = True: sizes repeat from step to step",
        )


def _convolutions(trace: Trace) -> list[Event]:
    return [op for op in trace.ops if op.name == "aten::_convolution" and op.backward is None]


def _recorded(op: Event) -> Event:
    """The op around it that made the autograd node."""
    return next((outer for outer in op.outer() if outer.name == "aten::convolution"), op)


def _flag(trace: Trace, op: Event, position: int, name: str, unknown: bool = False) -> bool:
    """What the convolution was told; else what was noted while profiling; else `unknown`."""
    told = op.values[position] if len(op.values) > position else ""
    if told in ("True", "False"):
        return told == "True"
    noted = trace.about.get(KEY)
    return bool(noted.get(name, unknown)) if isinstance(noted, dict) else unknown
