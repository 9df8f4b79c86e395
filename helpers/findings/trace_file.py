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
import gzip
import inspect
import json
import sys
import tempfile
import zlib
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import torch

from ..lab import files
from ..lab.arguments import LARGEST as LONGEST_US
from ..lab.arguments import has_form
from ..script.rates import speedups
from ..script.stacks import CALLED_FROM, call_sites
from . import trace as kinds
from .trace import Event, Note, Trace

# kineto's categories (torch 2), and those of the profiler before it.
_CATEGORIES = {
    kinds.OP: ("cpu_op", "operator"),
    kinds.ANNOTATION: ("user_annotation",),
    kinds.PYTHON: ("python_function",),
    kinds.RUNTIME: ("cuda_runtime", "cuda_driver", "hip_runtime", "hip_driver", "runtime"),
    kinds.KERNEL: ("kernel",),
    kinds.COPY: ("gpu_memcpy", "memcpy"),
    kinds.FILL: ("gpu_memset", "memset"),
}
_KINDS = {category: kind for kind, categories in _CATEGORIES.items() for category in categories}
LARGEST = 2**30  # bytes, unpacked: reading takes about four times as much memory
_ARGUMENTS = {  # that are read, and their forms
    **dict.fromkeys(("Sequence number", "Fwd thread id", "correlation", "In msg nelems"), int),
    **dict.fromkeys(("Call stack", CALLED_FROM, "Collective name"), str),
    **{"bytes": int | str, "Input Dims": [list], "Input type": [str], "Concrete Inputs": list},
}
_ABOUT = {  # of the file's other contents
    "deviceProperties": [{"computeMajor": int, "computeMinor": int}],
    "distributedInfo": {"rank": int, "world_size": int},
    **{"bf16_speedup": {str: float}, "settings": {str: str, "cores": int, "graphs": [[[int]]], "warned": [[str]]}},
}


def read_trace(source: "Trace | torch.profiler.profile | str | Path") -> Trace:
    """Read a live profile or a saved trace (.json or .json.gz); a `Trace` is returned as it is."""
    if isinstance(source, Trace):
        return source
    if isinstance(source, str | Path):
        return assemble(*load(source), named=str(source))
    if not hasattr(source, "export_chrome_trace"):
        raise ValueError(f"{type(source).__name__} is no profile: pass a torch.profiler.profile or a trace's path")
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
        events, about = load(path)
    site_of = call_sites(results, int(about.get("baseTimeNanoseconds", 0)))
    for event in events:
        if event.kind == kinds.PYTHON and (site := site_of(event.name, event.begin)):
            event.args.setdefault(CALLED_FROM, site)
    if not torch.cuda.is_available():
        about["bf16_speedup"] = speedups()
    trace = assemble(events, about)
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


def assemble(events: list[Event], about: dict[str, Any], named: str = "the trace") -> Trace:
    """The events as a `Trace`: nested, linked to what they launched, with notes on what can't be seen."""
    host = [e for e in events if e.kind not in kinds.ON_DEVICE]
    device = [e for e in events if e.kind in kinds.ON_DEVICE]
    if not any(e.kind in (kinds.OP, kinds.RUNTIME) for e in host) and not device:
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
    if any(e.name.startswith(kinds.BACKWARD) for e in host):
        return
    for event in host:
        node = event.kind == kinds.OP and event.args.get("Fwd thread id") and event.sequence is not None
        if node and not event.name.startswith("aten::"):
            event.name = kinds.BACKWARD + event.name


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
            event.scope = outer if outer.kind == kinds.ANNOTATION else outer.scope
        if event.kind == kinds.OP and event.name.startswith(kinds.BACKWARD):
            event.backward = event
        stack.append(event)


def _link(host: list[Event], device: list[Event]) -> None:
    """Attribute device time to the launching calls and all around these."""
    launches = {e.args["correlation"]: e for e in host if e.kind == kinds.RUNTIME and "correlation" in e.args}
    for event in device:
        event.device_us = event.us
        if launch := launches.get(event.args.get("correlation")):
            event.parent = launch
            launch.children.append(event)
        for outer in event.outer():
            outer.device_us += event.us


def _unseen(trace: Trace) -> Iterator[Note]:
    """What this trace can't show."""
    if trace.steps[0].name == kinds.WHOLE:
        text = "no steps are marked (a schedule and prof.step() mark them): the whole trace counts as one step"
        yield Note("no steps", text)
    if not trace.on_gpu:
        yield Note("no device", "no GPU events: only what the host shows is looked for, and times are the host's")
    if not any(e.kind == kinds.PYTHON or "Call stack" in e.args for e in trace.host):
        text = "no Python frames (with_stack=True records them): places are named by module ranges or by op"
        yield Note(kinds.NO_STACKS, text)
    if not any(e.dims for e in trace.host):
        text = "no shapes (record_shapes=True records them): matrix sizes, attention and constant work can't be seen"
        yield Note(kinds.NO_SHAPES, text)


def load(path: str | Path) -> tuple[list[Event], dict[str, Any]]:
    """The events of a trace, and the file's other contents. A ValueError in one line says why it can't be read."""
    text = _content(path)
    if not text.strip():
        raise ValueError(f"{path} is empty; a Chrome trace of torch.profiler (.json or .json.gz) is needed")
    try:
        about = json.loads(text, strict=False, object_hook=_decoded)
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError) as error:
        raise ValueError(f"{path} is no trace, or cut off or damaged: {error}") from None
    listed = about.pop("traceEvents", None) if isinstance(about, dict) else None
    if not listed or not isinstance(listed, list):
        raise ValueError(f"{path} is no trace: no trace events (torch.profiler's export_chrome_trace writes them)")
    if wrong := [name for name in _ABOUT if name in about and not has_form(about[name], _ABOUT[name])]:
        raise ValueError(f"{path} is damaged: {wrong[0]} isn't what torch writes")
    return [event for event in listed if isinstance(event, Event)], about


def _content(path: str | Path) -> str:
    """The text of a file, of which no more is read than may be kept."""
    try:
        with open(files.regular(path), "rb") as file:
            zipped = file.peek(2)[:2] == b"\x1f\x8b"
            data = (gzip.GzipFile(fileobj=file) if zipped else file).read(LARGEST + 1)
    except (OSError, EOFError, zlib.error) as error:
        raise ValueError(f"{path} can't be read as a trace: {getattr(error, 'strerror', None) or error}") from None
    if len(data) > LARGEST:
        raise ValueError(f"{path} is larger than {LARGEST >> 30} GiB: record fewer steps, or without stacks")
    return data.decode("utf-8", errors="replace")


def _decoded(raw: dict[str, Any]) -> Any:
    """An object of the JSON as an event, as soon as it is read; None for those of no kind that is looked at."""
    if "ph" not in raw:
        return raw
    kind = _KINDS.get(str(raw.get("cat", "")).lower())
    if kind is None or raw["ph"] != "X":
        return None
    begin, us, name = float(raw["ts"]), float(raw.get("dur", 0)), sys.intern(raw["name"])
    if not abs(begin) + abs(us) < LONGEST_US:
        raise ValueError(f"the time of {name} is no number")
    if kind == kinds.OP and name.startswith(kinds.TORCHS_OWN):  # as older versions of torch do
        kind = kinds.ANNOTATION
    args = {key: value for key, value in (raw.get("args") or {}).items() if key in _ARGUMENTS}
    if not all(has_form(value, _ARGUMENTS[key]) for key, value in args.items()):
        raise ValueError(f"the arguments of {name} aren't what torch writes")
    hash(track := (raw.get("pid"), raw.get("tid")))  # raises for what can't name a track
    return Event(name, kind, begin, begin + us, track, args)
