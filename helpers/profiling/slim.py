"""A trace without what nothing here reads, small enough to be kept beside a result or a test."""

import gzip
import json
from pathlib import Path
from typing import Any

from .events import ANNOTATION, COPY, FILL, KERNEL, OP, PYTHON, RUNTIME, Event, Trace

_CATEGORY = {
    OP: "cpu_op",
    ANNOTATION: "user_annotation",
    PYTHON: "python_function",
    RUNTIME: "cuda_runtime",
    KERNEL: "kernel",
    COPY: "gpu_memcpy",
    FILL: "gpu_memset",
}
_KEPT = ("Sequence number", "Input Dims", "Input type", "Concrete Inputs", "Called from", "correlation", "bytes")


def slim(trace: Trace, path: str | Path) -> int:
    """Save a trace as gzipped JSON with the fields that `diagnose` reads; returns the bytes written.

    Times count from the trace's beginning, in whole nanoseconds. Python frames in which nothing ran are left out, and
    so are flows, the allocator's events and where the trace was taken. The same trace is the same bytes.
    """
    start = min(e.begin for e in trace.host + trace.device)
    kept = [_raw(e, start) for e in trace.host + trace.device if e.kind != PYTHON or _holds_something(e)]
    about = {
        key: value for key, value in trace.about.items() if key in ("schemaVersion", "with_stack", "record_shapes")
    }
    about |= {key: value for key, value in trace.about.items() if key.startswith("helpers.")}
    text = json.dumps(about | {"traceEvents": kept}, separators=(",", ":"))
    data = gzip.compress(text.encode(), mtime=0)
    Path(path).write_bytes(data)
    return len(data)


def _raw(event: Event, start: float) -> dict[str, Any]:
    args = {key: event.args[key] for key in _KEPT if key in event.args}
    pid, tid = event.track
    return {
        "ph": "X",
        "cat": _CATEGORY[event.kind],
        "name": event.name,
        "pid": pid,
        "tid": tid,
        "ts": round(event.begin - start, 3),
        "dur": round(event.us, 3),
        "args": args,
    }


def _holds_something(frame: Event) -> bool:
    """Whether an op, a call or an annotation ran in it, or it is itself something that is looked for."""
    return any(e.kind != PYTHON for e in frame.inner()) or any(
        s in frame.name for s in (" cpu of ", " tolist of ", "empty_cache")
    )
