"""A profile's own file with its diagnosis added, for ui.perfetto.dev and chrome://tracing."""

import gzip
import json
import re
from decimal import Decimal
from pathlib import Path
from typing import Any

from helpers.lab import files

from .account import states
from .diagnosis import MOST_FINDINGS, Diagnosis
from .trace import Trace
from .trace_file import EVENT_BEGINS, content

PROCESS = 50_000_000  # above the largest process id of Linux, 4194304, and what kineto gives to devices
_LIST = re.compile(r'\s*\[|.*?"traceEvents"\s*:\s*\[', re.DOTALL)  # the format allows a list without what is around it
_CLOSED = re.compile(r"\}\s*\]")


def marked(source: str | Path, diagnosis: Diagnosis, trace: Trace, path: str | Path) -> Path:
    """Write the profile in `source` to `path`, with the diagnosis as a process of its own; gzipped if named ".gz".

    A thread shows the account (compute, communication, copies, idle and why), and one for each finding when it
    happened, with gain, place and advice as arguments. The file's text is not parsed, so what can't be parsed stays as
    it was. A file that is cut off ends with its last complete event.
    """
    path, text = Path(path), content(source, [])
    added = json.dumps(events(diagnosis, trace), separators=(",", ":"))[1:-1]
    begins = [match.start() for match in EVENT_BEGINS.finditer(text)]
    if begins and not _CLOSED.search(text, begins[-1]):
        text = text[: begins[-1]].rstrip().rstrip(",") + "]}"
    begin = _LIST.match(text).end()
    data = f"{text[:begin]}{added},{text[begin:]}".encode()
    return files.write(path, gzip.compress(data, 6, mtime=0) if path.suffix == ".gz" else data)


def events(diagnosis: Diagnosis, trace: Trace) -> list[dict[str, Any]]:
    """The diagnosis as events of Chrome's trace format, in the order of their beginnings."""
    track, parts = states(trace)
    threads: list[tuple[str, list]] = [(track, [(*span, part, {}) for part, spans in parts.items() for span in spans])]
    for number, finding in enumerate(diagnosis.findings[:MOST_FINDINGS], 1):
        args = {name: str(getattr(finding, name)) for name in ("gain", "where", "evidence", "advice")}
        threads.append((f"{number}. {finding.finding}", [(*span, finding.finding, args) for span in finding.spans]))
    names = [_named("process_name", 0, "diagnosis")]
    names.append({"ph": "M", "pid": PROCESS, "tid": 0, "name": "process_sort_index", "args": {"sort_index": -1}})
    slices: list[dict[str, Any]] = []
    for thread, (name, spans) in enumerate(threads, PROCESS + 1):
        names += [_named("thread_name", thread, name)] * bool(spans)
        shared = {"ph": "X", "cat": "diagnosis", "pid": PROCESS, "tid": thread}
        slices += [shared | {"name": label, "args": args} | _times(*span) for *span, label, args in spans]
    return names + sorted((event for event in slices if event["dur"]), key=lambda event: event["ts"])


def _times(begin: float, end: float) -> dict[str, float]:
    """Start and length in whole nanoseconds, so that a span that ends where the next begins does so as written, too.

    Times in µs since 1970 are written with one decimal, as a float has no more.
    """
    start, stop = (Decimal(repr(round(time, 3))) for time in (begin, end))
    return {"ts": float(start), "dur": float(stop - start)}


def _named(kind: str, thread: int, name: str) -> dict[str, Any]:
    return {"ph": "M", "pid": PROCESS, "tid": thread, "name": kind, "args": {"name": name}}
