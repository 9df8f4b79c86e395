"""A script's own clock: between which of its lines time is measured, and what happens in between.

`time.time` and its like give the script a `Reading`, a float that knows its line. When one is subtracted from another,
that is a measurement. So which two belong together is seen, not guessed. Each costs a microsecond or two.
"""

import sys
from collections import defaultdict
from collections.abc import Callable
from typing import Any, NamedTuple

from . import hooks
from .observation import Span
from .stacks import Line, is_library, user_line

MOST = 200  # measurements between two lines that are kept, the first ones


class State(NamedTuple):
    """What had happened when a clock was read."""

    ended: int  # iterations
    counted: int  # of these, without the first and those that were recorded, which slows them
    away_s: float  # in which they were
    evaluations: int
    pending: bool = False  # the device had work to do


class Reading(float):
    """What a clock told a script; copied and saved as the float that it is."""

    line: Line
    state: State
    measured: Callable[["Reading", "Reading", float], None]

    def __sub__(self, other: Any) -> Any:
        seconds = super().__sub__(other)
        if isinstance(other, Reading):
            self.measured(other, self, seconds)
        return seconds

    def __reduce__(self) -> Any:
        return float, (float(self),)


class Clock:
    """What a script measures by clocks of its own, or by CUDA's events, between two of its lines each."""

    def __init__(self, state: Callable[[], State]) -> None:
        self.state = state
        self.spans: dict[tuple[Line, Line], list[Span]] = defaultdict(list)

    def data(self) -> list[Any]:
        """[from line, to line, spans] for JSON."""
        return [[*lines, spans] for lines, spans in self.spans.items()]

    def measured(self, first: Reading, last: Reading, seconds: float) -> None:
        spans, begin, end = self.spans[first.line, last.line], first.state, last.state
        with_first = begin.ended == 0 < end.ended
        iterations, evaluated = end.counted - begin.counted + with_first, end.evaluations > begin.evaluations
        if len(spans) < MOST and (iterations or begin.ended == end.ended):
            away_s = end.away_s - begin.away_s
            spans.append(Span(seconds, away_s, iterations, with_first, evaluated, end.pending))

    def reading(self, seconds: float, frame: Any) -> Reading:
        reading = Reading(seconds)
        reading.line, reading.state, reading.measured = user_line(frame), self.state(), self.measured
        return reading

    def arounds(self) -> dict[hooks.Point, Callable[..., Any]]:
        return dict.fromkeys(hooks.CLOCKS, self._now) | {hooks.EVENT: self._event, hooks.ELAPSED: self._elapsed_ms}

    def _now(self, clock: Callable[[], float]) -> float:
        seconds, frame = clock(), sys._getframe(2)
        return seconds if is_library(frame.f_code.co_filename) else self.reading(seconds, frame)

    def _event(self, record: Callable[..., None], event: Any, *stream: Any, **options: Any) -> None:
        record(event, *stream, **options)
        event.reading = self.reading(0.0, sys._getframe(2))
        event.reading.state = event.reading.state._replace(pending=False)  # it is the device's own clock

    def _elapsed_ms(self, elapsed: Callable[..., float], event: Any, end: Any) -> float:
        ms = elapsed(event, end)
        if hasattr(event, "reading") and hasattr(end, "reading"):
            self.measured(event.reading, end.reading, ms / 1e3)
        return ms
