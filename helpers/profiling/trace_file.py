"""A file of torch.profiler, in the Chrome trace format, as events."""

import gzip
import json
import sys
import zlib
from math import isfinite
from pathlib import Path
from typing import Any

from ..lab import files
from ..watching.call_sites import CALLED_FROM
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
LARGEST = 2**30  # bytes, unpacked: reading takes about four times as much memory


def load(path: str | Path) -> tuple[list[Event], dict[str, Any]]:
    """The events of a trace, and the file's other contents. A ValueError in one line says why it can't be read."""
    text = _content(path)
    if not text.strip():
        raise ValueError(f"{path} is empty; a Chrome trace of torch.profiler (.json or .json.gz) is needed")
    try:
        about = json.loads(text, strict=False, object_hook=_decoded)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is no trace, or cut off or damaged: {error}") from None
    if isinstance(about, list):  # the format allows a list without what is around it
        about = {"traceEvents": about}
    listed = about.pop("traceEvents", None) if isinstance(about, dict) else None
    if not isinstance(listed, list) or not listed:
        raise ValueError(f"{path} is no trace: no trace events (torch.profiler's export_chrome_trace writes them)")
    return [event for event in listed if isinstance(event, Event)], about


def _content(path: str | Path) -> str:
    """The text of a file that isn't too large, which is known before it is kept: unpacking it twice costs little."""
    try:
        with open(files.regular(path), "rb") as file:
            zipped = file.peek(2)[:2] == b"\x1f\x8b"
            stream = gzip.GzipFile(fileobj=file) if zipped else file
            size = stream.seek(LARGEST + 1) if zipped else stream.seek(0, 2)
            stream.seek(0)
            data = stream.read() if size <= LARGEST else b""
    except (OSError, EOFError, zlib.error) as error:
        raise ValueError(f"{path} can't be read as a trace: {getattr(error, 'strerror', None) or error}") from None
    if size > LARGEST:
        raise ValueError(f"{path} is larger than {LARGEST >> 30} GiB: record fewer steps, or without stacks")
    return data.decode("utf-8", errors="replace")


def _decoded(raw: dict[str, Any]) -> Any:
    """An object of the JSON as an event, as soon as it is read; others stay as they are.

    None for events without a duration, a name or a time, and for those of no kind that is looked at.
    """
    if "ph" not in raw:
        return raw
    kind = _KINDS.get(str(raw.get("cat", "")).lower())
    if kind is None or raw["ph"] != "X":
        return None
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


# The arguments that are read, and of which type they are, or their parts.
_NUMBERS = ("Sequence number", "Fwd thread id", "correlation", "bytes", "In msg nelems")
_TEXTS = ("Call stack", CALLED_FROM, "Collective name")
_LISTS = {"Input Dims": list, "Input type": str, "Concrete Inputs": str}


def _checked_args(args: Any) -> dict[str, Any]:
    """The arguments that are read, without those of an unexpected type, so that readers need to handle missing ones."""
    if not isinstance(args, dict):
        return {}
    checked = {key: args[key] for key in _NUMBERS if isinstance(args.get(key), int)}
    checked |= {key: sys.intern(args[key]) for key in _TEXTS if isinstance(args.get(key), str)}
    lists = {key: args[key] for key in _LISTS if isinstance(args.get(key), list)}
    return checked | {key: parts for key, parts in lists.items() if all(isinstance(p, _LISTS[key]) for p in parts)}
