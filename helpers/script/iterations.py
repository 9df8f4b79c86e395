"""Iterations over time: into which kinds they fall, and whether they get slower over minutes (`--watch`).

An ordinary step is in each iteration. What an iteration takes beyond it belongs to its kind: an evaluation or a
checkpoint, what is between two epochs, or a step that is slow for a reason that its lines tell. What the thread waits
for a core is apart: that is no iteration's own.

Of a script that is watched for minutes, what there is gets counted at the 16th iteration, and again whenever half as
many more have ended: objects by type, open files, what a GPU's allocator holds unused, its clock and temperature. That
takes as long as a pass of Python's garbage collector.
"""

import contextlib
import gc
import itertools
import math
import os
import statistics
from array import array
from collections import Counter, defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from types import CodeType
from typing import Any

import torch

from ..lab.estimate import DECIDED, students
from .calls import Site
from .source_code import is_repeated, makes_for, repeats
from .stacks import DRAWING, EVALUATING, SAVING, Line, Stack

ORDINARY, SLOW, EPOCHS, NO_CORE = "ordinary steps", "slow steps", "between epochs", "without a core"
PHASE = "another phase"  # of the algorithm, whose results the steps train on, such as a rollout
KINDS = {EVALUATING: "with an evaluation", SAVING: "with a checkpoint", DRAWING: "with a figure"}  # by what they do
EVALUATED, BEGAN, RECORDED = 1, 2, 4  # marks: an evaluation or an epoch began, or the profiler slowed it
LONGER, APART = 1.6, 6  # times the median, and so many typical deviations above it: less is ordinary
RARELY = 0.25  # of the iterations: more than this aren't slow, but differ
POINTS, MOST_AT = 300, 50  # of each kind, that a page draws; that are told by number
MOSTLY, USUAL = 0.6, 0.3  # of what iterations of a kind do beyond ordinary ones, and of these: through a line

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


class Iterations:
    """When each ended, its seconds, those that it waited for a core or for Python's garbage collector, its marks."""

    def __init__(self) -> None:
        self.ended, self.took, self.waited, self.collected = array("d"), array("d"), array("d"), array("d")
        self.marks = bytearray()

    def add(self, now: float, seconds: float, marks: int = 0, collected: float = 0.0, waited: float = 0.0) -> None:
        self.ended.append(now)
        self.took.append(seconds)
        self.waited.append(min(waited, seconds))
        self.collected.append(collected)
        self.marks.append(marks)

    def plain(self) -> tuple[array, array]:
        """When those ended that neither evaluate nor begin an epoch, and their seconds."""
        chosen = [index for index, marks in enumerate(self.marks) if not marks]
        return array("d", [self.ended[i] for i in chosen]), array("d", [self.took[i] for i in chosen])

    def own(self) -> array:
        """The seconds of each but for its waits for a core."""
        return array("d", (took - waited for took, waited in zip(self.took, self.waited, strict=True)))

    def slow_from(self) -> float:
        """The seconds from which on an iteration is no ordinary one; infinite where too many are."""
        took = [seconds for seconds, marks in zip(self.own(), self.marks, strict=True) if not marks & RECORDED]
        if len(took) < 3:
            return math.inf
        usual = statistics.median(took)
        deviation = statistics.median(abs(seconds - usual) for seconds in took)
        least = max(LONGER * usual, usual + APART * deviation)
        return least if sum(seconds > least for seconds in took) <= RARELY * len(took) else math.inf

    def next_slow(self) -> tuple[float, int]:
        """The share of the time in slow iterations beyond ordinary ones, and how many from now the next is likely.

        0 where they come at odd times, or too few have come.
        """
        own, least = self.own(), self.slow_from()
        slow = [i for i, marks in enumerate(self.marks) if own[i] > least and not marks & RECORDED]
        apart = [after - before for before, after in itertools.pairwise(slow)][-3:]
        if not slow:
            return 0.0, 0
        usual = statistics.median(own)
        share = sum(own[index] - usual for index in slow) / math.fsum(own)
        regular = len(apart) > 1 and max(apart) - min(apart) <= 1 < min(apart)
        return share, slow[-1] + apart[-1] - len(own) + 1 if regular else 0

    def kinds(self, doing: Mapping[int, Mapping[str, float]]) -> list[str]:
        """The kind of each iteration; "" of a recorded one. `doing` are the seconds by activity in an iteration."""
        least, found = self.slow_from(), []
        for index, (seconds, marks) in enumerate(zip(self.own(), self.marks, strict=True)):
            mostly = next((kind for name, kind in KINDS.items() if 2 * doing.get(index, {}).get(name, 0) > seconds), "")
            if marks & RECORDED:
                found.append("")
            elif seconds <= least:
                found.append(ORDINARY)
            elif marks & BEGAN:
                found.append(EPOCHS)
            else:
                found.append(KINDS[EVALUATING] if marks & EVALUATED else mostly or SLOW)
        return found

    def points(self, kinds: list[str]) -> list[tuple[float, float, str]]:
        """Seconds since the first, seconds that it took, kind: of each kind the slowest few, and some in between."""
        by_kind: dict[str, list[int]] = defaultdict(list)
        for index, kind in enumerate(kinds):
            by_kind[kind].append(index)
        chosen: set[int] = set()
        for indices in by_kind.values():
            slowest = sorted(indices, key=self.took.__getitem__)[-POINTS // 10 :]
            chosen |= {*indices[:: len(indices) // POINTS + 1], *slowest}
        return [(round(self.ended[i] - self.ended[0], 4), round(self.took[i], 6), kinds[i]) for i in sorted(chosen)]


def wall_time(
    iterations: Iterations,
    kinds: list[str],
    stacks: Mapping[str, Mapping[tuple[str, Stack], float]],
    ran: Collection[Site] = (),
) -> dict[str, Any]:
    """The time since the first iteration, but for what was recorded: an ordinary step in each, and the rest by kind.

    `stacks` are the seconds of each kind by what was done, and `ran` are lines that run in an ordinary iteration. Of a
    kind `spent` is what its iterations do beyond ordinary ones, by activity and line, and `line` what `_cause` returns.
    """
    by_kind: dict[str, list[int]] = defaultdict(list)
    for index, kind in enumerate(kinds):
        by_kind[kind].append(index)
    recorded, usual = by_kind.pop("", []), by_kind.pop(ORDINARY, [])
    own = iterations.own()
    step_s = math.fsum(own[index] for index in usual) / max(len(usual), 1)
    count = len(usual) + sum(map(len, by_kind.values()))
    rows: list[dict[str, Any]] = [{"kind": ORDINARY, "count": count, "seconds": step_s * count, "took_s": step_s}]
    for kind, indices in by_kind.items():
        took = [own[index] for index in indices]
        row = {"kind": kind, "count": len(took), "seconds": math.fsum(took) - step_s * len(took)}
        row |= {"took_s": statistics.median(took), "at": indices[-MOST_AT:]}
        row |= {"collected_s": math.fsum(iterations.collected[index] for index in indices)}
        beyond = _beyond(stacks.get(kind, {}), stacks.get(ORDINARY, {}), len(took) / max(len(usual), 1), ran)
        if beyond.pop("for_steps") and kind in (SLOW, EPOCHS):
            kinds = [PHASE if each == kind else each for each in kinds]
            row["kind"] = PHASE
        rows.append(row | beyond)
    waited = math.fsum(iterations.waited[index] for index, kind in enumerate(kinds) if kind)
    rows += [{"kind": NO_CORE, "count": count, "seconds": waited, "took_s": waited / max(count, 1)}]
    rows[1:] = sorted(rows[1:], key=lambda row: -row["seconds"])
    seconds = math.fsum(row["seconds"] for row in rows)
    recorded_s = math.fsum(iterations.took[index] for index in recorded)
    whole = {"seconds": seconds, "recorded_s": recorded_s, "iterations": len(kinds), "kinds": rows}
    return whole | {"points": iterations.points(kinds)}


def _beyond(
    stacks: Mapping[Any, float], usual: Mapping[Any, float], often: float, ran: Collection[Site]
) -> dict[str, Any]:
    """What is done in iterations of a kind, `often` times as many as ordinary ones, beyond what these do."""
    spent: Any = Counter()
    passed: Any = Counter()
    for part, sign in ((stacks, 1.0), (usual, -often)):
        for (activity, stack), seconds in part.items():
            spent[activity, *stack[0]] += sign * seconds
            passed.update(dict.fromkeys(stack, sign * seconds))
    depth = {site: stack[::-1].index(site) for _, stack in stacks for site in stack}
    more = sum(seconds for seconds in spent.values() if seconds > 0)
    always: Any = Counter()
    for (_, stack), seconds in usual.items():
        always.update(dict.fromkeys(stack, seconds / max(sum(usual.values()), 1e-9)))
    usually = {site for site in always if always[site] > USUAL}
    through = [site for site in depth if passed[site] >= MOSTLY * more > 0 and site not in usually]
    cause, for_steps = _cause(sorted(through, key=depth.__getitem__), usually.union(ran))
    lines = [[what, code.co_filename, n, seconds] for (what, code, n), seconds in spent.most_common(LINES)]
    line = [cause[0].co_filename, cause[1], cause[0].co_name] if cause else []
    return {"spent": [row for row in lines if row[-1] > 0], "line": line, "for_steps": for_steps}


def innermost(seconds: Mapping[tuple[str, Stack], float], activity: str, outside: Collection[CodeType]) -> Line | None:
    """The most expensive line of the innermost function that most of an activity's seconds pass through.

    Functions that are `outside` of it don't count.
    """
    chosen = {stack: taken for (what, stack), taken in dict(seconds).items() if what == activity}
    through: Any = Counter()  # functions
    passed: Any = Counter()  # lines
    depths: dict[CodeType, int] = {}
    for stack, taken in chosen.items():
        through.update(dict.fromkeys((code for code, _ in stack), taken))
        passed.update(dict.fromkeys(stack, taken))
        depths |= {code: depth for depth, (code, _) in enumerate(reversed(stack)) if code not in outside}
    most = [code for code in depths if through[code] >= MOSTLY * sum(chosen.values())]
    if not most:
        return None
    deepest = max(most, key=depths.__getitem__)
    return deepest.co_filename, max((site for site in passed if site[0] is deepest), key=passed.__getitem__)[1]


def _cause(through: list[Site], ordinary: set[Site]) -> tuple[Site | None, bool]:
    """The line that a person would edit so that something rare takes less, and whether steps train on what it makes.

    That is the innermost one that runs once, and not in ordinary iterations: what is further in is what a loop repeats,
    further out it is only passed on. Where all run in ordinary iterations, too, and take little there, the innermost.
    """
    lines: dict[CodeType, list[int]] = defaultdict(list)
    for code, line in ordinary:
        lines[code].append(line)
    cause, for_steps = None, False
    for code, line in (site for site in through if site not in ordinary):
        repeated = is_repeated(code.co_filename, line, lines[code])
        for_steps |= cause is None and makes_for(code.co_filename, line, lines[code])
        cause = cause if cause and repeated else (code, line)
        if repeated or repeats(code.co_filename, line):
            break
    return cause or next(reversed(through), None), for_steps


class Pace:
    """What there was at some iterations of a script that is watched for minutes."""

    def __init__(self) -> None:
        self._looks: list[dict[str, Any]] = []
        self._next = FIRST_LOOK

    def is_due(self, iterations: int) -> bool:
        return iterations >= self._next

    def look(self, iterations: int, seconds: Mapping[Any, float]) -> None:
        """Count what there is. `seconds` are those of each (activity, stack) so far."""
        self._next = math.ceil(LATER * iterations)
        by_line: Counter[Line] = Counter()
        for (_, ((code, line), *_)), taken in dict(seconds).items():
            by_line[code.co_filename, line] += taken
        lines = [[*line, taken] for line, taken in by_line.most_common(LINES)]
        kept = Counter(type(each).__name__ for each in gc.get_objects())
        self._looks.append({"iterations": iterations, "lines": lines, "kept": kept, "counted": _counted()})

    def data(self, iterations: Iterations) -> dict[str, Any]:
        return {"blocks": blocks(*iterations.plain()), "looks": self._looks}


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
