"""A trace of torch.profiler as Python objects: what ran inside what, on the host and on the device, step by step.

    trace = read_trace(prof)                 # after the `with` block
    trace = read_trace("trace.json.gz")      # what prof.export_chrome_trace wrote
    trace.notes                              # what could not be read or seen, in words

A live profile is exported to a temporary file and read back, so that there is one way to read. It knows one thing
more, which the export leaves out: the line in the caller of every Python call. Before torch 2.13 a profile can be
exported only once, and this is that once: to keep it, export it and read the file.

A file may be plain or gzipped, whole or cut off. What is whole costs one JSON parse, about 5 s and 500 MB of memory for
100 MB; `with_stack=True` makes a trace several times as large. What is not whole is read event by event up to where it
breaks, and on from the next event that can be read.
"""

import contextlib
import inspect
import json
import re
import tempfile
import zlib
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import torch

from .trace import ANNOTATION, BACKWARD, COPY, FILL, KERNEL, ON_DEVICE, OP, PYTHON, RUNTIME, TORCHS_OWN, Event, Trace

# kineto's categories (torch 2), and those of the profiler before it.
_KINDS = {
    "cpu_op": OP,
    "user_annotation": ANNOTATION,
    "python_function": PYTHON,
    "cuda_runtime": RUNTIME,
    "cuda_driver": RUNTIME,
    "kernel": KERNEL,
    "gpu_memcpy": COPY,
    "gpu_memset": FILL,
    "operator": OP,
    "runtime": RUNTIME,
    "memcpy": COPY,
    "memset": FILL,
}


def read_trace(source: "Trace | torch.profiler.profile | str | Path") -> Trace:
    """Read a live profile, a saved trace (.json or .json.gz), or hand on what is read already.

    What can't be read is left out and said in `notes`; a ValueError where nothing can be.
    """
    if isinstance(source, Trace):
        return source
    if isinstance(source, str | Path):
        return parse(*load(source))
    if not hasattr(source, "export_chrome_trace"):
        raise ValueError(
            f"a profile is a {type(source).__name__}; it must be a torch.profiler.profile or a trace's path"
        )
    return _read_profile(source)


# A profile that has been read, its results then, and the trace: before torch 2.13 it can be read once only.
_READ: "WeakKeyDictionary[torch.profiler.profile, tuple[Any, Trace]]" = WeakKeyDictionary()


def _read_profile(profile: torch.profiler.profile) -> Trace:
    results = getattr(profile.profiler, "kineto_results", None)
    if results is None:
        raise ValueError("the profile holds nothing: leave its `with` block first, with a schedule that has recorded")
    if profile in _READ and _READ[profile][0] is results:
        return _READ[profile][1]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        _export(profile, str(path))
        events, about, faults = load(path)
    _add_call_sites(results, events, about)
    trace = parse(events, about, faults)
    _READ[profile] = results, trace
    return trace


def _export(profile: torch.profiler.profile, path: str) -> None:
    """Export without using the profile up, where torch can (2.13) and every name can still be read."""
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


def parse(events: list[dict[str, Any]], about: dict[str, Any], faults: list[str]) -> Trace:
    """Events of the Chrome trace format, in any order, as a `Trace`; `faults` says what could not be read of them."""
    host, device, unusable = [], [], 0
    for raw in events:
        kind = _KINDS.get(str(raw.get("cat", "")).lower())
        args = _usable(raw.get("args"))
        try:
            if kind is not None and raw.get("ph") == "X":
                begin = float(raw["ts"])
                end = begin + max(float(raw.get("dur", 0)), 0.0)
                name, track = str(raw["name"]), (raw.get("pid"), raw.get("tid"))
                if kind == OP and name.startswith(TORCHS_OWN):  # as older versions file them
                    kind = ANNOTATION
                (device if kind in ON_DEVICE else host).append(Event(name, kind, begin, end, track, args))
        except (KeyError, TypeError, ValueError):
            unusable += 1
    if not any(e.kind in (OP, RUNTIME) for e in host) and not device:
        raise ValueError(
            "the trace holds no op and no kernel: it isn't torch.profiler's, or its schedule ended in a cycle in which "
            "nothing ran (repeat=1 records one cycle)"
        )
    faults = faults + [f"{unusable} events without a name or a time are left out"] * (unusable > 0)
    host.sort(key=lambda e: (e.begin, -e.end))
    device.sort(key=lambda e: e.begin)
    _nest(host)
    lost = _link(host, device)
    trace = Trace(host, device, about, list(faults), complete=not faults)
    trace.notes.extend(_unseen(trace, lost))
    return trace


# The arguments that are read, and what they consist of.
_NUMBERS = ("Sequence number", "correlation", "bytes")
_LISTS = {"Input Dims": list, "Input type": str, "Concrete Inputs": str}


def _usable(args: Any) -> dict[str, Any]:
    """Arguments without those that are of another kind than torch.profiler's; so a missing one is all that can be."""
    if not isinstance(args, dict):
        return {}
    foreign = [key for key in _NUMBERS if key in args and not isinstance(args[key], int)]
    for key, kind in _LISTS.items():
        value = args.get(key, [])
        if not isinstance(value, list) or not all(isinstance(part, kind) for part in value):
            foreign.append(key)
    return {key: value for key, value in args.items() if key not in foreign} if foreign else args


def _nest(host: list[Event]) -> None:
    """What began while something of its thread was running, ran inside that."""
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


def _link(host: list[Event], device: list[Event]) -> int:
    """Hand device time to the calls that launched it and to all around them; returns how many have no launch."""
    launches = {e.args["correlation"]: e for e in host if e.kind == RUNTIME and "correlation" in e.args}
    lost = 0
    for event in device:
        event.device_us = event.us
        launch = launches.get(event.args.get("correlation"))
        lost += launch is None
        if launch is not None:
            event.parent = launch
            launch.children.append(event)
        for outer in event.outer():
            outer.device_us += event.us
    return lost


def _unseen(trace: Trace, lost: int) -> Iterator[str]:
    """What this trace can't show, in words."""
    if trace.steps[0].name == "whole trace":
        yield "no steps are marked (a schedule and prof.step() mark them): the whole trace counts as one step"
    if not trace.on_gpu:
        yield "no GPU events: only what the host shows is looked for, and times are the host's"
    if lost:
        yield f"{lost} device events have no launch in the trace, and count for no op"
    if not any(e.kind == PYTHON for e in trace.host):
        yield "no Python frames (with_stack=True records them): places are named by module ranges or by op"
    if not any(e.dims for e in trace.host):
        yield "no shapes (record_shapes=True records them): matrix sizes, attention and constant work can't be seen"


_INEXACT_NS = (0, 1, -1, 2, -2)  # how far an exported time may be from the profile's own, the nearest first


def _add_call_sites(results: Any, events: list[dict[str, Any]], about: dict[str, Any]) -> None:
    """Write into every Python frame which line called it; only the live profile knows.

    Frames are found by their name and when they began. An exported time is a float of microseconds since the quarter of
    the year began, which late in it is off by a nanosecond or two; no function is called twice within so few.

    The profile doesn't own its names. Those of code that is gone, as a line's at a prompt is once it has run, may be
    bytes of something else by now.
    """
    base = int(about.get("baseTimeNanoseconds", 0))
    waiting = list(results.experimental_event_tree())
    sites = {}
    while waiting:
        event = waiting.pop()
        waiting.extend(event.children)
        caller = getattr(event.extra_fields, "caller", None)
        if caller is not None:
            with contextlib.suppress(UnicodeDecodeError):
                site = f"{caller.file_name}({caller.line_number}): {caller.function_name}"
                sites[event.name, event.start_time_ns - base] = site
    for raw in events:
        if raw.get("cat") == "python_function":
            began = round(float(raw["ts"]) * 1e3)
            site = next((s for off in _INEXACT_NS if (s := sites.get((raw["name"], began + off)))), None)
            if site:
                raw.setdefault("args", {})["Called from"] = site


# An event as torch.profiler writes it, at whatever place the last readable one left us.
_EVENT_BEGINS = re.compile(r'\{\s*"(?:ph|name|cat)"\s*:')


def load(path: str | Path) -> tuple[list[dict[str, Any]], dict[str, Any], list[str]]:
    """The events of a trace, what the file says besides them, and what could not be read (nothing, if it is whole).

    A ValueError in one line says why nothing could be.
    """
    path = Path(path)
    try:
        data = path.read_bytes()
    except OSError as error:
        raise ValueError(f"{path} can't be read as a trace: {error.strerror}") from None
    notes: list[str] = []
    if data[:2] == b"\x1f\x8b":
        data = _unzip(data, notes)
    text = data.decode("utf-8", errors="replace")
    if not text.strip():
        raise ValueError(f"{path} is empty; a Chrome trace of torch.profiler (.json or .json.gz) is needed")
    try:
        whole = json.loads(text, strict=False)
    except (json.JSONDecodeError, RecursionError):
        whole = None
    if isinstance(whole, list):  # the format allows a bare list of events
        whole = {"traceEvents": whole}
    if isinstance(whole, dict) and isinstance(whole.get("traceEvents"), list):
        events, about = whole.pop("traceEvents"), whole
    else:
        events, about = _salvage(text, notes) if whole is None else ([], {})
    events = [event for event in events if isinstance(event, dict)]
    if not events:
        raise ValueError(
            f"{path} is no trace: it holds no trace events (torch.profiler's export_chrome_trace writes them)"
        )
    return events, about, notes


def _unzip(data: bytes, notes: list[str]) -> bytes:
    """All that can be unpacked, a kilobyte at a time so that little is lost where the data breaks."""
    parts, position = [], 0
    member = zlib.decompressobj(wbits=31)
    try:
        while position < len(data):
            if member.eof:  # gzip files may follow each other in one file
                member = zlib.decompressobj(wbits=31)
            chunk = data[position : position + 1024]
            parts.append(member.decompress(chunk))
            position += len(chunk) - len(member.unused_data)
        if not member.eof:
            notes.append("the gzip data is cut off: read as far as it goes")
    except zlib.error:
        notes.append("the gzip data is damaged: read as far as it goes")
    return b"".join(parts)


def _salvage(text: str, notes: list[str]) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """The complete events of a JSON text that is not."""
    listed = text.find('"traceEvents"')
    position = text.find("[", max(listed, 0))
    if position < 0:
        return [], {}
    decode = json.JSONDecoder(strict=False).raw_decode
    events, unreadable = [], 0
    while found := _EVENT_BEGINS.search(text, position):
        try:
            event, position = decode(text, found.start())
            events.append(event)
        except (json.JSONDecodeError, RecursionError):
            unreadable += 1
            position = found.end()
    if events:
        notes.append(f"the JSON is cut off or damaged: {len(events)} complete events read, {unreadable} left out")
    return events, _head(text[: max(listed, 0)])


def _head(text: str) -> dict[str, Any]:
    """What stands before the events: the device, the profiler's settings, what the user noted."""
    try:
        return json.loads(text.rstrip().rstrip(",") + "}", strict=False)
    except json.JSONDecodeError:
        return {}
