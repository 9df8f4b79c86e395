"""Watched steps as a trace in Chrome's trace-event format, which ui.perfetto.dev and chrome://tracing open.

Three tracks (steps, forward, backward) of spans that lie properly in each other, and the level of memory in the
weighed step as a counter. What checkpointing computes again lies where it happens, in the backward.
"""

import gzip
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from helpers.lab import files
from helpers.lab.memory import MIB

from .spans import BACKWARD, FORWARD, RECOMPUTE, STEP, Step

PROCESS = 1
TRACKS = {STEP: 1, FORWARD: 2, BACKWARD: 3, RECOMPUTE: 3}
TRACK_NAMES = {1: "steps", 2: "forward", 3: "backward"}


def events(steps: Sequence[Step], title: str, paths: list[str], types: list[str], counter: str) -> list[dict[str, Any]]:
    """Names of process and tracks, then all events by time, what lies around others before these."""
    found = [event for step in steps for event in _spans(step, paths, types) + _levels(step, counter)]
    found.sort(key=lambda event: (event["ts"], -event.get("dur", 0)))
    return _names(title) + found


def write(path: str | Path, events: list[dict[str, Any]], unix_ns: int) -> Path:
    """Write the trace whole, or not at all; gzipped if the name ends in .gz. Times count from `unix_ns` after 1970."""
    path = Path(path)
    if not path.parent.is_dir():
        raise ValueError(f"path is {str(path)!r}; its folder must exist")
    trace = {"displayTimeUnit": "ms", "baseTimeNanoseconds": unix_ns, "traceEvents": events}
    data = json.dumps(trace, separators=(",", ":"), allow_nan=False).encode()
    if path.suffix == ".gz":
        data = gzip.compress(data, mtime=0)
    return files.write(path, data)


def _names(title: str) -> list[dict[str, Any]]:
    named = [{"ph": "M", "name": "process_name", "pid": PROCESS, "tid": 0, "args": {"name": title}}]
    for track, name in TRACK_NAMES.items():
        at = {"ph": "M", "pid": PROCESS, "tid": track}
        named.append(at | {"name": "thread_name", "args": {"name": name}})
        named.append(at | {"name": "thread_sort_index", "args": {"sort_index": track}})
    return named


def _spans(step: Step, paths: list[str], types: list[str]) -> list[dict[str, Any]]:
    found = []
    for span in step.spans:
        begin, end = int(step.times_ns[span.begin]), int(step.times_ns[span.end])
        if span.kind == STEP:
            name, args = f"step {step.number}", {"step": step.number, "recorded": step.kept is None}
        else:
            name = paths[span.module]
            args = {"step": step.number, "module": name, "type": types[span.module]}
        at = {"ph": "X", "name": name, "cat": span.kind, "pid": PROCESS, "tid": TRACKS[span.kind]}
        found.append(at | {"ts": _us(begin), "dur": _us(end - begin), "args": args})
    return found


def _levels(step: Step, counter: str) -> list[dict[str, Any]]:
    """The counter at each moment once, the last level that was seen there."""
    levels = {int(time): level for time, (level, _) in zip(step.times_ns, step.levels, strict=False)}
    at = {"ph": "C", "name": f"{counter} (MiB)", "pid": PROCESS, "tid": 0}
    return [at | {"ts": _us(time), "args": {"mib": level / MIB}} for time, level in levels.items()]


def _us(ns: int) -> float:
    """Microseconds with three places: to the nanosecond."""
    return ns / 1000
