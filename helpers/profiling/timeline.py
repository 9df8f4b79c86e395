"""One step of a trace as rows to draw, and its kernels as a table."""

import pandas as pd

from .busy import device_idle_share
from .events import ANNOTATION, COPY, FILL, KERNEL, OP, STEP, Event, Trace

__all__ = ["device_idle_share", "kernel_table", "timeline"]


def timeline(trace: Trace, step: int = -1) -> pd.DataFrame:
    """What ran in a step, for drawing: rows of (track, name, begin_ms, end_ms), from the step's beginning.

    Tracks are "annotations" (loader, optimizer, ranges of the user's), "host" and "backward thread" (outermost ops),
    and "stream N". Device work is what the step launched, when it ran: that may be after the step's end.
    """
    if not -len(trace.steps) <= step < len(trace.steps):
        raise ValueError(
            f"step is {step}; the trace has {len(trace.steps)} steps, counted from 0 (or from -1, backwards)"
        )
    place = step % len(trace.steps)
    start = trace.steps[place].begin
    shown = [(track, e) for e in trace.host + trace.device if trace.step_of(e) == place and (track := _track(trace, e))]
    rows = [(track, e.name, (e.begin - start) / 1e3, (e.end - start) / 1e3) for track, e in shown]
    return pd.DataFrame(rows, columns=["track", "name", "begin_ms", "end_ms"])


def _track(trace: Trace, event: Event) -> str | None:
    if event.kind == ANNOTATION:
        return "annotations" if event.track == trace.thread and not event.name.startswith(STEP) else None
    if event.kind == OP:
        if any(outer.kind == OP for outer in event.outer()):
            return None
        return "host" if event.track == trace.thread else "backward thread"
    return f"stream {event.track[1]}" if event.kind in (KERNEL, COPY, FILL) else None


def kernel_table(trace: Trace) -> pd.DataFrame:
    """The kernels, the longest in total first: name, how many a step, total ms of all steps, share of kernel time."""
    kernels = [e for e in trace.device if e.kind == KERNEL and trace.step_of(e) is not None]
    rows = pd.DataFrame({"name": [e.name for e in kernels], "ms": [e.us / 1e3 for e in kernels]})
    table = rows.groupby("name")["ms"].agg(count="size", total_ms="sum").reset_index()
    table["count"] /= len(trace.steps)
    table["share"] = table["total_ms"] / table["total_ms"].sum()
    return table.sort_values("total_ms", ascending=False, ignore_index=True)
