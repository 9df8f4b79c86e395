"""A file of torch.profiler, in the Chrome trace format, as events; or what is wrong with it."""

import json
import re
import sys
import zlib
from math import isfinite
from pathlib import Path
from typing import Any

from .call_sites import CALLED_FROM
from .trace import ANNOTATION, COPY, FILL, KERNEL, OP, PYTHON, RUNTIME, TORCHS_OWN, Event

# kineto's categories (torch 2), and those of the profiler before it.
_CATEGORIES = {
    OP: ("cpu_op", "operator"),
    ANNOTATION: ("user_annotation",),
    PYTHON: ("python_function",),
    RUNTIME: ("cuda_runtime", "cuda_driver", "hip_runtime", "hip_driver", "runtime"),
    KERNEL: ("kernel",),
    COPY: ("gpu_memcpy", "memcpy"),
    FILL: ("gpu_memset", "memset"),
}
_KINDS = {category: kind for kind, categories in _CATEGORIES.items() for category in categories}


# The beginning of an event as torch.profiler writes it, to go on after one that can't be parsed.
EVENT_BEGINS = re.compile(r'\{\s*"(?:ph|name|cat)"\s*:')
_BETWEEN = re.compile(r"[\s,]*")
LARGEST = 2**30  # bytes, unpacked: reading takes about four times as much memory
TOO_DEEP = "its JSON is nested too deeply"


def load(path: str | Path) -> tuple[list[Event], dict[str, Any], list[str]]:
    """The events of a trace, the file's other contents, and what could not be read, in words.

    A ValueError in one line says why nothing could be read.
    """
    faults: list[str] = []
    text = content(path, faults)
    if not text.strip():
        raise ValueError(f"{path} is empty; a Chrome trace of torch.profiler (.json or .json.gz) is needed")
    events, about, read = _decode(text, faults)
    if not read:
        why = TOO_DEEP if TOO_DEEP in faults else "it holds no trace events"
        raise ValueError(f"{path} is no trace: {why} (torch.profiler's export_chrome_trace writes them)")
    return events, about, faults


def content(path: str | Path, faults: list[str]) -> str:
    """The file's text, of a damaged gzip file as far as it can be unpacked."""
    try:
        with open(path, "rb") as stream:
            data = stream.read(LARGEST + 1)
    except OSError as error:
        raise ValueError(f"{path} can't be read as a trace: {error.strerror}") from None
    if data[:2] == b"\x1f\x8b":
        data = _unzip(data, faults)
    if data is None or len(data) > LARGEST:
        raise ValueError(f"{path} is larger than {LARGEST >> 30} GiB: record fewer steps, or without stacks")
    return data.decode("utf-8", errors="replace")


def _unzip(data: bytes, faults: list[str]) -> bytes | None:
    """The data as far as it can be unpacked, a kilobyte at a time so that little is lost where it breaks.

    None if it is more than `LARGEST`.
    """
    parts, position, size = [], 0, 0
    member = zlib.decompressobj(wbits=31)
    try:
        while position < len(data):
            if member.eof:  # gzip files may follow each other in one file
                member = zlib.decompressobj(wbits=31)
            chunk = data[position : position + 1024]
            parts.append(member.decompress(chunk))
            size += len(parts[-1])
            if size > LARGEST:
                return None
            position += len(chunk) - len(member.unused_data)
        if not member.eof:
            faults.append("the gzip data is cut off: read as far as it goes")
    except zlib.error:
        faults.append("the gzip data is damaged: read as far as it goes")
    return b"".join(parts)


def _decode(text: str, faults: list[str]) -> tuple[list[Event], dict[str, Any], int]:
    """The events of the list, decoded one at a time, what stands around it, and how many there were of any kind."""
    listed = text.find('"traceEvents"')
    position = text.find("[", max(listed, 0))
    if position < 0 or (listed < 0 and text[:position].strip()):  # the format allows a bare list of events
        return [], {}, 0
    decode = json.JSONDecoder(strict=False).raw_decode
    events, read, unusable, unreadable = [], 0, 0, 0
    begin, position = position, position + 1
    while True:
        position = _BETWEEN.match(text, position).end()
        if text[position : position + 1] == "]":
            break
        try:
            raw, position = decode(text, position)
        except (ValueError, RecursionError) as error:  # a ValueError also by a number of thousands of digits
            if isinstance(error, RecursionError) and TOO_DEEP not in faults:
                faults.append(TOO_DEEP)
            following = EVENT_BEGINS.search(text, position + 1)
            unreadable += 1
            if following is None:
                break
            position = following.start()
            continue
        if not isinstance(raw, dict):
            continue
        read += 1
        kind = _KINDS.get(str(raw.get("cat", "")).lower())
        if kind is not None and raw.get("ph") == "X":
            event = _event(raw, kind)
            events += [event] * (event is not None)
            unusable += event is None
    if unusable:
        faults.append(f"{unusable} events without a name or a time are left out")
    if unreadable or position >= len(text):
        if read:
            faults.append(f"the JSON is cut off or damaged: {read} complete events read, {unreadable} left out")
        return events, {}, read
    about = _around(text[:begin], text[position + 1 :])
    if about is None:
        faults.append(f"the JSON is cut off behind its {read} events")
    return events, about or {}, read


def _around(head: str, tail: str) -> dict[str, Any] | None:
    """The file's other contents: the device, the profiler's settings, the user's metadata; None if it is cut off."""
    try:
        about = json.loads(f"{head}[]{tail}", strict=False)
    except (ValueError, RecursionError):
        return None
    return {key: value for key, value in about.items() if key != "traceEvents"} if isinstance(about, dict) else {}


def _event(raw: dict[str, Any], kind: str) -> Event | None:
    """None for an event without a name or a time."""
    try:
        begin = float(raw["ts"])
        end = begin + max(float(raw.get("dur", 0)), 0.0)
        name, track = sys.intern(str(raw["name"])), (raw.get("pid"), raw.get("tid"))
        hash(track)
    except (KeyError, TypeError, ValueError, OverflowError):
        return None
    if not isfinite(end):
        return None
    if kind == OP and name.startswith(TORCHS_OWN):  # as older versions of torch do
        kind = ANNOTATION
    return Event(name, kind, begin, end, track, _checked_args(raw.get("args")))


# The arguments that are read, and what they consist of.
_NUMBERS = ("Sequence number", "Fwd thread id", "correlation", "bytes", "In msg nelems", "Group size")
_LISTS = {"Input Dims": list, "Input type": str, "Concrete Inputs": str}
_TEXTS = ("Call stack", CALLED_FROM, "Collective name", "dtype")


def _checked_args(args: Any) -> dict[str, Any]:
    """The arguments that are read, without those of an unexpected type, so that readers need to handle missing ones."""
    if not isinstance(args, dict):
        return {}
    checked = {key: args[key] for key in _NUMBERS if isinstance(args.get(key), int)}
    checked |= {key: sys.intern(args[key]) for key in _TEXTS if isinstance(args.get(key), str)}
    for key, kind in _LISTS.items():
        value = args.get(key)
        if value and isinstance(value, list) and all(isinstance(part, kind) for part in value):
            checked[key] = value
    return checked
