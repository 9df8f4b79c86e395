"""Whether iterations get slower over minutes, at which line, and what grows meanwhile: `dlspeed profile --watch`.

What there is gets counted at the 16th iteration, and again whenever half as many more have ended: objects by type, open
files, what a GPU's allocator holds unused, its clock and temperature. That takes as long as a pass of Python's garbage
collector.
"""

import contextlib
import gc
import itertools
import math
import os
import statistics
from array import array
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ..lab.estimate import DECIDED, students
from .stacks import Line

FIRST_LOOK, LATER = 16, 1.5  # iterations, and by how much more of them the next look comes
BLOCKS, LEAST_BLOCKS = 24, 8  # equal parts of the time, and how many of them must hold iterations
EACH = 0.1  # more of something an iteration, from which on it grows
CLOCK, CELSIUS, UNUSED, FILES = "clock, MHz", "temperature, °C", "MiB reserved and not used", "open files"
LINES = 50  # that a look keeps, the dearest so far


@dataclass(frozen=True)
class Trend:
    """The time of an iteration at both ends of a line through all, and the interval of the growth a minute."""

    first_ms: float
    last_ms: float
    minutes: float
    low: float
    high: float

    @property
    def growth(self) -> float:
        return math.log(self.last_ms / self.first_ms) / self.minutes

    @property
    def most(self) -> float:
        """The largest growth over the whole time that isn't excluded."""
        return math.expm1(max(abs(self.low), abs(self.high)) * self.minutes)


class Pace:
    """The seconds of all iterations that neither evaluate nor begin an epoch, and what there was at some of them."""

    def __init__(self) -> None:
        self._ended, self._took = array("d"), array("d")
        self._looks: list[dict[str, Any]] = []
        self._next = FIRST_LOOK

    def add(self, now: float, seconds: float) -> None:
        self._ended.append(now)
        self._took.append(seconds)

    def is_due(self, iterations: int) -> bool:
        return iterations >= self._next

    def look(self, iterations: int, seconds: Mapping[Any, float]) -> None:
        """Count what there is. `seconds` are those of each (function, line, activity) so far."""
        self._next = math.ceil(LATER * iterations)
        by_line: Counter[Line] = Counter()
        for (code, line, _), taken in dict(seconds).items():
            by_line[code.co_filename, line] += taken
        lines = [[*line, taken] for line, taken in by_line.most_common(LINES)]
        kept = Counter(type(each).__name__ for each in gc.get_objects())
        self._looks.append({"iterations": iterations, "lines": lines, "kept": kept, "counted": _counted()})

    def data(self) -> dict[str, Any]:
        return {"blocks": blocks(self._ended, self._took), "looks": self._looks}


def _counted() -> dict[str, float]:
    numbers: dict[str, float] = {}
    with contextlib.suppress(OSError):
        numbers[FILES] = len(os.listdir("/proc/self/fd"))
    if torch.cuda.is_initialized():
        numbers[UNUSED] = (torch.cuda.memory_reserved() - torch.cuda.memory_allocated()) / 2**20
        with contextlib.suppress(Exception):  # no nvidia-ml-py, or a card that doesn't tell
            numbers |= {CLOCK: torch.cuda.clock_rate(), CELSIUS: torch.cuda.temperature()}
    return numbers


def blocks(ended: Sequence[float], took: Sequence[float]) -> list[list[float]]:
    """Minutes since the first iteration ended and the median in ms, for each of some equal parts of the time."""
    whole = ended[-1] - ended[0] if len(ended) > LEAST_BLOCKS else 0.0
    parts: list[list[float]] = [[] for _ in range(BLOCKS)]
    for at, seconds in zip(ended, took, strict=True) if whole else ():
        parts[min(int((at - ended[0]) / whole * BLOCKS), BLOCKS - 1)].append(seconds)
    middles = [(number + 0.5) / BLOCKS * whole / 60 for number in range(BLOCKS)]
    return [[at, statistics.median(part) * 1e3] for at, part in zip(middles, parts, strict=True) if part]


def trend(medians: list[list[float]]) -> Trend | None:
    """A line through the logs of the blocks' medians; None of too few."""
    if len(medians) < LEAST_BLOCKS:
        return None
    at, logs = [block[0] for block in medians], [math.log(block[1]) for block in medians]
    slope, start = statistics.linear_regression(at, logs)
    left = sum((y - start - slope * x) ** 2 for x, y in zip(at, logs, strict=True)) / (len(at) - 2)
    error = math.sqrt(left / sum((x - statistics.fmean(at)) ** 2 for x in at)) * students(DECIDED, len(at) - 2)
    first_ms, last_ms = (math.exp(start + slope * x) for x in (at[0], at[-1]))
    return Trend(first_ms, last_ms, at[-1] - at[0], slope - error, slope + error)


def grown(looks: list[dict[str, Any]]) -> list[tuple[str, float]]:
    """What there was more of at each look, and how much more an iteration; the most first."""
    if len(looks) < 3:
        return []
    iterations = looks[-1]["iterations"] - looks[0]["iterations"]
    found = []
    for part, names in (("kept", looks[-1]["kept"]), ("counted", (FILES, UNUSED))):
        for name in names:
            numbers = [look[part].get(name, 0) for look in looks]
            each = (numbers[-1] - numbers[0]) / iterations
            if each >= EACH and all(before < after for before, after in itertools.pairwise(numbers)):
                found.append((name, each))
    return sorted(found, key=lambda more: -more[1])


def later_line(looks: list[dict[str, Any]]) -> tuple[Line, float] | None:
    """The line that takes most seconds an iteration more in the later half than in the earlier one, and how many."""
    if len(looks) < 3:
        return None
    middle = min(looks[1:-1], key=lambda look: abs(look["iterations"] - looks[-1]["iterations"] / 2))

    def each(begin: dict[str, Any], end: dict[str, Any]) -> dict[Line, float]:
        before = {(file, line): seconds for file, line, seconds in begin["lines"]}
        iterations = end["iterations"] - begin["iterations"]
        return {(f, n): (seconds - before.get((f, n), 0.0)) / iterations for f, n, seconds in end["lines"]}

    earlier, later = each(looks[0], middle), each(middle, looks[-1])
    more = {line: seconds - earlier.get(line, 0.0) for line, seconds in later.items()}
    line = max(more, key=more.__getitem__, default=None)
    return (line, more[line]) if line and more[line] > 0 else None
