"""Spans of time, in order and disjoint, as sets: unions, intersections, differences, lengths."""

from bisect import bisect_left, bisect_right
from math import inf

from .trace import Event

Spans = list[tuple[float, float]]  # in µs on the profile's clock


def union(events: list[tuple[float, float]]) -> Spans:
    spans: Spans = []
    for begin, end in sorted(events):
        if spans and begin <= spans[-1][1]:
            if end > spans[-1][1]:
                spans[-1] = (spans[-1][0], end)
        elif end > begin:
            spans.append((begin, end))
    return spans


def of(events: list[Event]) -> Spans:
    """The spans in which at least one of the events runs."""
    return union([(e.begin, e.end) for e in events])


def intersect(left: Spans, right: Spans) -> Spans:
    both, i, j = [], 0, 0
    while i < len(left) and j < len(right):
        begin, end = max(left[i][0], right[j][0]), min(left[i][1], right[j][1])
        if begin < end:
            both.append((begin, end))
        if left[i][1] < right[j][1]:
            i += 1
        else:
            j += 1
    return both


def subtract(left: Spans, right: Spans) -> Spans:
    edges = [-inf, *(time for span in right for time in span), inf]
    return intersect(left, list(zip(edges[::2], edges[1::2], strict=True)))


def length(spans: Spans) -> float:
    return sum(end - begin for begin, end in spans)


def covered(spans: Spans, begin: float, end: float) -> float:
    """How much of [begin, end] the spans cover."""
    first = bisect_right(spans, begin, key=lambda span: span[1])
    last = bisect_left(spans, end, key=lambda span: span[0])
    return sum(min(stop, end) - max(start, begin) for start, stop in spans[first:last])
