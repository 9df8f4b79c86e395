"""A trace of torch.profiler as Python objects: what ran inside what, on the host and on the device, step by step.

    trace = read_trace(prof)                 # after the `with` block
    trace = read_trace("trace.json.gz")      # what prof.export_chrome_trace wrote
    trace.notes                              # what it can't show, in words

A live profile is exported to a temporary file and read back. The line of every Python call in its caller, which the
export leaves out, is added from the profile. Before torch 2.13 a profile can be exported only once, and reading it here
uses that up: to keep the trace, export it and read the file.

A file may be plain or gzipped. 100 MB take about 5 s and 400 MB of memory; `with_stack=True` makes a trace several
times as large.
"""

import contextlib
import inspect
import tempfile
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from ..watching.call_sites import CALLED_FROM, call_sites
from ..watching.rates import speedups
from .trace import ANNOTATION, BACKWARD, NO_SHAPES, NO_STACKS, ON_DEVICE, OP, PYTHON, RUNTIME, WHOLE, Event, Note, Trace
from .trace_file import load


def read_trace(source: "Trace | torch.profiler.profile | str | Path") -> Trace:
    """Read a live profile or a saved trace (.json or .json.gz); a `Trace` is returned as it is."""
    if isinstance(source, Trace):
        return source
    if isinstance(source, str | Path):
        return assemble(*load(source), named=str(source))
    if not hasattr(source, "export_chrome_trace"):
        raise ValueError(f"{type(source).__name__} is no profile: pass a torch.profiler.profile or a trace's path")
    return _read_profile(source)


def _read_profile(profile: torch.profiler.profile) -> Trace:
    results = getattr(profile.profiler, "kineto_results", None)
    if results is None:
        raise ValueError("the profile holds nothing: leave its `with` block first, with a schedule that has recorded")
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        _export(profile, str(path))
        events, about = load(path)
    site_of = call_sites(results, int(about.get("baseTimeNanoseconds", 0)))
    for event in events:
        if event.kind == PYTHON and (site := site_of(event.name, event.begin)):
            event.args.setdefault(CALLED_FROM, site)
    if not torch.cuda.is_available():
        about["bf16_speedup"] = speedups()
    return assemble(events, about)


def _export(profile: torch.profiler.profile, path: str) -> None:
    """Export so that it can be exported again, where torch can (2.13) and every name can still be decoded."""
    if "use_python_export" in inspect.signature(profile.export_chrome_trace).parameters:
        with contextlib.suppress(UnicodeDecodeError):
            profile.export_chrome_trace(path, use_python_export=True)
            return
    try:
        profile.export_chrome_trace(path)
    except RuntimeError as error:
        if "already saved" not in str(error):
            raise
        raise ValueError("the profile is exported already, which torch allows once: read the exported file") from None


def assemble(events: list[Event], about: dict[str, Any], named: str = "the trace") -> Trace:
    """The events as a `Trace`: nested, linked to what they launched, with notes on what can't be seen."""
    host = [e for e in events if e.kind not in ON_DEVICE]
    device = [e for e in events if e.kind in ON_DEVICE]
    if not any(e.kind in (OP, RUNTIME) for e in host) and not device:
        raise ValueError(
            f"{named} holds no op and no kernel: it isn't torch.profiler's, or its schedule ended in a cycle in which "
            "nothing ran (repeat=1 records one cycle)"
        )
    host.sort(key=lambda e: (e.begin, -e.end))
    device.sort(key=lambda e: e.begin)
    _name_nodes(host)
    _nest(host)
    _link(host, device)
    trace = Trace(host, device, about)
    if not any(step.end > step.begin for step in trace.steps):
        raise ValueError(f"{named} holds no time: its steps begin and end at once")
    trace.notes.extend(_unseen(trace))
    return trace


def _name_nodes(host: list[Event]) -> None:
    """Give the backward events of torch before 1.10, which are named by their node alone, today's names."""
    if any(e.name.startswith(BACKWARD) for e in host):
        return
    for event in host:
        node = event.kind == OP and event.args.get("Fwd thread id") and event.sequence is not None
        if node and not event.name.startswith("aten::"):
            event.name = BACKWARD + event.name


def _nest(host: list[Event]) -> None:
    """Set parents and children: an event ran inside the one of its thread that was running when it began."""
    stacks: dict[Any, list[Event]] = defaultdict(list)
    for event in host:
        stack = stacks[event.track]
        while stack and stack[-1].end <= event.begin:
            stack.pop()
        if stack:
            outer = event.parent = stack[-1]
            outer.children.append(event)
            event.backward = outer.backward
            event.scope = outer if outer.kind == ANNOTATION else outer.scope
        if event.kind == OP and event.name.startswith(BACKWARD):
            event.backward = event
        stack.append(event)


def _link(host: list[Event], device: list[Event]) -> None:
    """Attribute device time to the launching calls and all around these."""
    launches = {e.args["correlation"]: e for e in host if e.kind == RUNTIME and "correlation" in e.args}
    for event in device:
        event.device_us = event.us
        if launch := launches.get(event.args.get("correlation")):
            event.parent = launch
            launch.children.append(event)
        for outer in event.outer():
            outer.device_us += event.us


def _unseen(trace: Trace) -> Iterator[Note]:
    """What this trace can't show."""
    if trace.steps[0].name == WHOLE:
        text = "no steps are marked (a schedule and prof.step() mark them): the whole trace counts as one step"
        yield Note("no steps", text)
    if not trace.on_gpu:
        yield Note("no device", "no GPU events: only what the host shows is looked for, and times are the host's")
    if not any(e.kind == PYTHON or "Call stack" in e.args for e in trace.host):
        text = "no Python frames (with_stack=True records them): places are named by module ranges or by op"
        yield Note(NO_STACKS, text)
    if not any(e.dims for e in trace.host):
        text = "no shapes (record_shapes=True records them): matrix sizes, attention and constant work can't be seen"
        yield Note(NO_SHAPES, text)
