"""The line that made each Python call, which a live profile knows and its export leaves out."""

import contextlib
import sys
from collections.abc import Callable
from typing import Any

from .run_script import OWN_FILES

CALLED_FROM = "Called from"  # the argument of a Python event
_STARTERS = ("bin/dlspeed", "runpy.py", "<frozen runpy>")
_INEXACT_NS = (0, 1, -1, 2, -2)  # how far an exported time may be from the profile's own, the nearest first


def runners() -> Callable[[str], bool]:
    """Whether a file's frames are around a script that `watch` runs; torch cuts an entry of sys.path off its name."""
    cut = [name.removeprefix(f"{folder}/") for name in OWN_FILES for folder in sys.path if folder]
    names = {*OWN_FILES, *cut}
    return lambda path: path in names or path.endswith(_STARTERS)


def call_sites(results: Any, base_ns: int) -> Callable[[str, float], str | None]:
    """A function from a call's name and start (µs after `base_ns`) to "file(line): function"; None where unknown.

    Calls are matched by name and start. An exported time is a float of microseconds since the quarter of the year
    began, so it may be off by a nanosecond or two; no function is called twice within so little time.

    The profile doesn't own its strings. Names of code that was freed, such as a line at a prompt, may be overwritten by
    now and fail to decode.
    """
    is_runner = runners()
    sites: dict[tuple[str, int], str] = {}
    waiting: list[tuple[Any, str | None]] = [(event, None) for event in results.experimental_event_tree()]
    while waiting:
        event, site = waiting.pop()
        caller = getattr(event.extra_fields, "caller", None)
        with contextlib.suppress(UnicodeDecodeError):
            if caller is not None and not is_runner(caller.file_name):  # else the site of our frame around it
                site = f"{caller.file_name}({caller.line_number}): {caller.function_name}"
            if caller is not None and site:
                sites[event.name, event.start_time_ns - base_ns] = site
        waiting.extend((child, site) for child in event.children)

    def site_of(name: str, begin_us: float) -> str | None:
        began = round(begin_us * 1e3)
        return next((site for off in _INEXACT_NS if (site := sites.get((name, began + off)))), None)

    return site_of
