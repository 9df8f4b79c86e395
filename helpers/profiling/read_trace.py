"""A trace of torch.profiler as Python objects: what ran inside what, on the host and on the device, step by step.

    trace = read_trace(prof)                 # after the `with` block
    trace = read_trace("trace.json.gz")      # what prof.export_chrome_trace wrote
    trace.notes                              # what could not be read or seen, in words

A live profile is exported to a temporary file and read back. The line of every Python call in its caller, which the
export leaves out, is added from the profile. Before torch 2.13 a profile can be exported only once, and reading it here
uses that up: to keep the trace, export it and read the file.

A file may be plain or gzipped, complete or cut off. A complete one costs one JSON parse, about 5 s and 500 MB of memory
for 100 MB; `with_stack=True` makes a trace several times as large. A damaged one is read event by event, skipping what
can't be parsed.
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
    """Read a live profile or a saved trace (.json or .json.gz); a `Trace` is returned as it is.

    `notes` of the result say what could not be read; a ValueError if nothing could.
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


# The results and the trace of each profile that was read: before torch 2.13 it can be exported only once.
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


def parse(events: list[dict[str, Any]], about: dict[str, Any], faults: list[str]) -> Trace:
    """Events of the Chrome trace format, in any order, as a `Trace`; `faults` says what could not be read of them."""
    host, device, unusable = [], [], 0
    for raw in events:
        kind = _KINDS.get(str(raw.get("cat", "")).lower())
        args = _checked_args(raw.get("args"))
        try:
            if kind is not None and raw.get("ph") == "X":
                begin = float(raw["ts"])
                end = begin + max(float(raw.get("dur", 0)), 0.0)
                name, track = str(raw["name"]), (raw.get("pid"), raw.get("tid"))
                if kind == OP and name.startswith(TORCHS_OWN):  # as older versions of torch do
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


def _checked_args(args: Any) -> dict[str, Any]:
    """The arguments without those of an unexpected type, so that readers need to handle missing ones only."""
    if not isinstance(args, dict):
        return {}
    foreign = [key for key in _NUMBERS if key in args and not isinstance(args[key], int)]
    for key, kind in _LISTS.items():
        value = args.get(key, [])
        if not isinstance(value, list) or not all(isinstance(part, kind) for part in value):
            foreign.append(key)
    return {key: value for key, value in args.items() if key not in foreign} if foreign else args


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


def _link(host: list[Event], device: list[Event]) -> int:
    """Attribute device time to the launching calls and all around these; returns how many events have no launch."""
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
    """Notes on what this trace can't show."""
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
    """Add the calling line, which only the live profile knows, to every Python frame.

    Frames are matched by name and start. An exported time is a float of microseconds since the quarter of the year
    began, so it may be off by a nanosecond or two; no function is called twice within so little time.

    The profile doesn't own its strings. Names of code that was freed, such as a line at a prompt, may be overwritten by
    now and fail to decode.
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


# The beginning of an event as torch.profiler writes it, to go on after one that can't be parsed.
_EVENT_BEGINS = re.compile(r'\{\s*"(?:ph|name|cat)"\s*:')


def load(path: str | Path) -> tuple[list[dict[str, Any]], dict[str, Any], list[str]]:
    """The events of a trace, the file's other contents, and notes on what could not be read.

    A ValueError in one line says why nothing could be read.
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
        content = json.loads(text, strict=False)
    except (json.JSONDecodeError, RecursionError):
        content = None
    if isinstance(content, list):  # the format allows a bare list of events
        content = {"traceEvents": content}
    if isinstance(content, dict) and isinstance(content.get("traceEvents"), list):
        events, about = content.pop("traceEvents"), content
    else:
        events, about = _salvage(text, notes) if content is None else ([], {})
    events = [event for event in events if isinstance(event, dict)]
    if not events:
        raise ValueError(
            f"{path} is no trace: it holds no trace events (torch.profiler's export_chrome_trace writes them)"
        )
    return events, about, notes


def _unzip(data: bytes, notes: list[str]) -> bytes:
    """The data as far as it can be unpacked, a kilobyte at a time so that little is lost where it breaks."""
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
    """The complete events of an incomplete JSON text, and what precedes the list of events."""
    listed = text.find('"traceEvents"')
    position = text.find("[", max(listed, 0))
    if position < 0:
        return [], {}
    decode = json.JSONDecoder(strict=False).raw_decode
    events, unreadable = [], 0
    while match := _EVENT_BEGINS.search(text, position):
        try:
            event, position = decode(text, match.start())
            events.append(event)
        except (json.JSONDecodeError, RecursionError):
            unreadable += 1
            position = match.end()
    if events:
        notes.append(f"the JSON is cut off or damaged: {len(events)} complete events read, {unreadable} left out")
    return events, _head(text[: max(listed, 0)])


def _head(text: str) -> dict[str, Any]:
    """What precedes the events: the device, the profiler's settings, the user's metadata."""
    try:
        return json.loads(text.rstrip().rstrip(",") + "}", strict=False)
    except json.JSONDecodeError:
        return {}
