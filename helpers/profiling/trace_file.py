"""A file of torch.profiler, in the Chrome trace format, as events."""

import gzip
import json
import sys
import zlib
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
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise ValueError(f"{path} is no trace, or cut off or damaged: {error}") from None
    listed = about.pop("traceEvents", None) if isinstance(about, dict) else None
    if not listed:
        raise ValueError(f"{path} is no trace: no trace events (torch.profiler's export_chrome_trace writes them)")
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
    begin, name = float(raw["ts"]), sys.intern(raw["name"])
    if kind == OP and name.startswith(TORCHS_OWN):  # as older versions of torch do
        kind = ANNOTATION
    args = {key: value for key, value in (raw.get("args") or {}).items() if key in _ARGUMENTS}
    return Event(name, kind, begin, begin + float(raw.get("dur", 0)), (raw.get("pid"), raw.get("tid")), args)


_ARGUMENTS = {  # that are read
    "Sequence number", "Fwd thread id", "correlation", "bytes", "In msg nelems", "Call stack", CALLED_FROM,
    "Collective name", "Input Dims", "Input type", "Concrete Inputs",
}  # fmt: skip
