"""Device time in a trace: spans in which kernels run, the idle share of the steps, one step as rows to draw."""

from bisect import bisect_left, bisect_right
from itertools import pairwise

import pandas as pd

from .trace import ANNOTATION, COPY, FILL, KERNEL, OP, STEP, Event, Trace

Spans = list[tuple[float, float]]


def kernel_spans(trace: Trace) -> Spans:
    """Spans in which a kernel runs on any stream, in order and disjoint. Copies and fills count as idle time."""
    spans: Spans = []
    for event in trace.device:
        if event.kind != KERNEL:
            continue
        if spans and event.begin <= spans[-1][1]:
            spans[-1] = (spans[-1][0], max(spans[-1][1], event.end))
        else:
            spans.append((event.begin, event.end))
    return spans


def covered(spans: Spans, begin: float, end: float) -> float:
    """How much of [begin, end] the spans cover."""
    first = bisect_right(spans, begin, key=lambda span: span[1])
    last = bisect_left(spans, end, key=lambda span: span[0])
    return sum(min(stop, end) - max(start, begin) for start, stop in spans[first:last])


def device_windows(trace: Trace) -> Spans:
    """The steps on the device's own clock: from the first kernel that a step launched to the next step's first.

    The host may run steps ahead of the device, so the host's steps don't delimit the device's. The last step is left
    out, as no next one ends it; a single step ends with its last kernel or on the host, whichever is later.
    """
    firsts: dict[int, float] = {}
    for event in trace.device:
        step = trace.step_of(event) if event.kind == KERNEL else None
        if step is not None:
            firsts.setdefault(step, event.begin)
    if len(firsts) > 1:
        return list(pairwise(firsts[step] for step in sorted(firsts)))
    step = trace.steps[0]
    return [(step.begin, max([step.end, *(e.end for e in trace.device if e.kind == KERNEL)]))] if firsts else []


def device_idle_share(trace: Trace) -> float | None:
    """The share of the steps' time in which no kernel runs; None without a GPU.

    It is a mean over all steps, since a loader that delivers in bursts stalls only some of them. A profiler slows the
    host, most of all with `with_stack=True`: take the share from a profile without it.
    """
    spans, windows = kernel_spans(trace), device_windows(trace)
    total = sum(end - begin for begin, end in windows)
    return 1 - sum(covered(spans, begin, end) for begin, end in windows) / total if total else None


def timeline(trace: Trace) -> pd.DataFrame:
    """The last step as rows to draw: (track, name, begin_ms, end_ms), counted from the step's beginning.

    Tracks are "annotations" (loader, optimizer, the user's ranges), "host" and "backward thread" (outermost ops),
    and "stream N". Device work belongs to the step that launched it, so it may run after the step's end.
    """
    last = len(trace.steps) - 1
    start = trace.steps[last].begin
    shown = [(track, e) for e in trace.host + trace.device if trace.step_of(e) == last and (track := _track(trace, e))]
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
