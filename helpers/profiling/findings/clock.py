"""Is the number right that a script tells of itself? What its own clock reads, what lies in it, what a step takes."""

import statistics
from collections.abc import Iterator
from typing import Any

from ...watching.clock import Span
from ...watching.stacks import place
from ..diagnosis import milliseconds
from ..trace import Note

OFF = 0.15  # of a step: a clock that reads so much more or less is told of


def own_clock(data: dict[str, Any], step_ms: float) -> Iterator[Note]:
    """What the clock that runs longest reads beside the step's time, and why where they differ."""
    pairs = [(lines, [Span(*span) for span in spans]) for *lines, spans in data.get("clock", [])]
    pairs.sort(key=lambda pair: -max(span.seconds for span in pair[1]))
    whole = [pair for pair in pairs if any(span.iterations for span in pair[1])] or pairs
    for lines, spans in whole[:1]:
        spans = [span for span in spans if span.iterations] or spans
        reads = spans[-1].each_ms if spans[-1].with_first else statistics.median(span.each_ms for span in spans)
        between = " to ".join(dict.fromkeys(place(*line) for line in lines))
        text = f"the script's own clock ({between}) reads {milliseconds(reads)}"
        text += " an iteration" if spans[-1].iterations else " in one"
        yield Note("clock", f"{text}, a step takes {milliseconds(step_ms)}{_why(spans, reads, step_ms)}{_padded(data)}")


def _why(spans: list[Span], reads: float, step_ms: float) -> str:
    if abs(reads / step_ms - 1) < OFF:
        return ""
    if spans[-1].pending and reads < step_ms:
        return ": it stops before the device is done, so synchronise before reading it"
    if not spans[-1].iterations:
        return ": it holds a part of an iteration"
    if reads < step_ms:
        return ": something of an iteration lies outside of it"
    inside = []
    if spans[-1].with_first:
        inside.append("the first iteration (compilation, warm-up, the loader's start)")
    if sum(span.evaluated for span in spans) > len(spans) / 2:
        inside.append("evaluation")
    return f": it contains {' and '.join(inside)}" if inside else ": it contains more than training steps"


def _padded(data: dict[str, Any]) -> str:
    positions, padded, _ = data["padding"] or (1, 0, 0)
    if padded / positions < OFF:
        return ""
    return (
        f"; {padded / positions:.0%} of the positions are padding: a rate that counts them is "
        f"{positions / (positions - padded):.2g}× that of tokens"
    )
