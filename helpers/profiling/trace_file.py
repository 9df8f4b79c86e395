"""From bytes to the events of a Chrome trace: plain or gzipped, whole or cut off.

What is whole costs one JSON parse (about 2 s for 100 MB). What is not is read event by event up to where it breaks, and
on from the next event that can be read.
"""

import json
import re
import zlib
from pathlib import Path
from typing import Any

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
