"""A profile's own file with its diagnosis added, for ui.perfetto.dev and chrome://tracing."""

import gzip
import json
import re
import zlib
from collections.abc import Iterator
from decimal import Decimal
from pathlib import Path
from typing import Any

from helpers.lab import files

from .account import IDLE, device_account, host_account
from .diagnosis import SHOWN, Diagnosis, Finding, Spans
from .trace import Trace

PROCESS = 50_000_000  # above the largest process id of Linux, 4194304, and what kineto gives to devices
CHUNK = 2**20
_LIST = re.compile(rb'"traceEvents"\s*:\s*\[')
_EVENT = re.compile(rb'\{\s*"(?:ph|name|cat)"\s*:')


def marked(source: str | Path, diagnosis: Diagnosis, trace: Trace, path: str | Path) -> Path:
    """Write the profile in `source` to `path`, with the diagnosis as a process of its own; gzipped if named ".gz".

    A thread shows the account (compute, communication, copies, idle and why), and one for each finding when it
    happened, with gain, place and advice as arguments. The text is copied a megabyte at a time and never parsed, so
    this needs little memory beyond `trace`, and what can't be parsed stays as it was. A file that is cut off ends with
    its last complete event. The new file is written completely or not at all.
    """
    path = Path(path)
    added = json.dumps(events(diagnosis, trace), separators=(",", ":")).encode()[1:-1]
    with files.replacing(path) as stream:
        out = gzip.GzipFile("", "wb", 6, stream, mtime=0) if path.suffix == ".gz" else stream
        for chunk in _spliced(_closed(_chunks(Path(source))), added):
            out.write(chunk)
        if out is not stream:
            out.close()
    return path


def events(diagnosis: Diagnosis, trace: Trace) -> list[dict[str, Any]]:
    """The diagnosis as events of Chrome's trace format, in the order of their beginnings."""
    track, parts = states(trace)
    threads = [(track, [(*span, part, {}) for part, spans in parts.items() for span in spans])]
    for number, finding in enumerate(diagnosis.findings[:SHOWN], 1):
        threads.append((f"{number}. {finding.finding}", _slices(finding)))
    names = [_named("process_name", 0, "diagnosis")]
    names.append({"ph": "M", "pid": PROCESS, "tid": 0, "name": "process_sort_index", "args": {"sort_index": -1}})
    slices = []
    for thread, (name, spans) in enumerate(threads, PROCESS + 1):
        names += [_named("thread_name", thread, name)] * bool(spans)
        slices += [
            {"ph": "X", "cat": "diagnosis", "name": said, "pid": PROCESS, "tid": thread, "args": args}
            | _times(begin, end)
            for begin, end, said, args in spans
        ]
    return names + sorted((event for event in slices if event["dur"]), key=lambda event: event["ts"])


def _times(begin: float, end: float) -> dict[str, float]:
    """Start and length in whole nanoseconds, so that a span that ends where the next begins does so as written, too.

    Times in µs since 1970 are written with one decimal, as a float has no more.
    """
    start, stop = (Decimal(repr(round(time, 3))) for time in (begin, end))
    return {"ts": float(start), "dur": float(stop - start)}


def _named(kind: str, thread: int, name: str) -> dict[str, Any]:
    return {"ph": "M", "pid": PROCESS, "tid": thread, "name": kind, "args": {"name": name}}


def _slices(finding: Finding) -> list[tuple[float, float, str, dict[str, str]]]:
    names = ("gain", "where", "evidence", "advice")
    args = {name: str(getattr(finding, name)) for name in names}
    return [(begin, end, finding.finding, args) for begin, end in finding.spans]


def states(trace: Trace) -> tuple[str, dict[str, Spans]]:
    """("device", when it is in which part of the account, idle time by its reason); of a CPU's trace ("loop", …)."""
    account = device_account(trace)
    if account is None:
        return "loop", host_account(trace)
    busy = {part: spans for part, spans in account.parts.items() if part != IDLE}
    return "device", busy | {f"{IDLE}: {reason}": spans for reason, spans in account.idle.items()}


def _chunks(source: Path) -> Iterator[bytes]:
    """The file's text, unpacked; of a damaged gzip file what can be."""
    with open(source, "rb") as plain:
        zipped = plain.read(2) == b"\x1f\x8b"
        plain.seek(0)
        stream = gzip.GzipFile(fileobj=plain) if zipped else plain
        try:
            while chunk := stream.read1(CHUNK):
                yield chunk
        except (EOFError, zlib.error, gzip.BadGzipFile):
            return


def _closed(chunks: Iterator[bytes]) -> Iterator[bytes]:
    """The same text; if it ends within the list of events, without the last one and with the list closed."""
    last = b""
    for chunk in chunks:
        if len(last) > CHUNK:
            yield last
            last = b""
        last += chunk
    *_, begin = [None, *(match.start() for match in _EVENT.finditer(last))]
    if begin is not None and not re.search(rb"\}\s*\]", last[begin:]):
        last = last[:begin].rstrip().rstrip(b",") + b"]}"
    yield last


def _spliced(chunks: Iterator[bytes], added: bytes) -> Iterator[bytes]:
    """The text with events added at the beginning of its list."""
    head = b""
    for chunk in chunks:
        head += chunk
        bare = head.lstrip()[:1] == b"["  # the format allows a list of events without what is around it
        match = re.match(rb"\s*\[", head) if bare else _LIST.search(head)
        if match:
            yield head[: match.end()] + added + b","
            yield head[match.end() :]
            break
    yield from chunks
