"""`speed_guard.json`: the counts of each step that is guarded, and what is more than they say.

It lies beside a test or a script and is meant to be committed: by torch's minor version and class of machine, then by
the step's name. A line of the user's is known by its text, so that it may move.
"""

import json
import math
from collections import Counter, defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ..lab import files, markdown
from ..lab.arguments import has_form
from ..lab.machine import device_class
from .counting import CALLS, COUNTERS, LAUNCHES, MOVED, OPERATORS, PADDING, PEAK, STORED, Counts
from .places import Chain, growth, inclusive, source

FILE = "speed_guard.json"
PARTS = LINES, NAMES = "lines", "operators by name"
STEP = {LINES: {str: {str: float}}, NAMES: {str: float}, str: float}  # the form of a step's entry
# What may be more: a share, and a number. A function may be split, which does no more.
SHARES = {STORED: 0.01, PEAK: 0.01, MOVED: 0.01, CALLS: 0.5}
LEAST = {CALLS: 50, PADDING: 0.05}
NAMED, SMALL = 4, 0.05  # operators that are named; the share of a number below which a line isn't written down
POSITIONS = "positions of ids"
_BYTES, _FLOPS = (" bytes", " KiB", " MiB", " GiB"), ("", " thousand", " million", " billion")


@dataclass(frozen=True)
class Difference:
    """A counter of a step that isn't what is written down, with the operators and the lines by which it grew."""

    counter: str
    change: str
    operators: str = ""
    lines: tuple[str, ...] = ()

    def __str__(self) -> str:
        operators = f" ({self.operators})" if self.operators else ""
        return ": ".join(filter(None, [f"{self.counter} {self.change}{operators}", ", ".join(self.lines)]))


@dataclass(frozen=True)
class Comparison:
    """What a step has more and less to do than a file says. `known`: the file has counts of it for this machine."""

    name: str
    file: Path
    known: bool
    more: tuple[Difference, ...] = ()
    less: tuple[Difference, ...] = ()

    def __str__(self) -> str:
        return "\n  ".join([f"{self.name} has more to do than {self.file.name} says", *map(str, self.more)])

    def markdown(self) -> str:
        """For a pull request: the verdict, what is more by line, and what is less."""
        file = markdown.code(self.file.name)
        if not self.known:
            verdict = "nothing to compare with"
            parts = [f"{file} had no counts of it for torch {key()}. They were written, and are to be committed."]
        elif not self.more:
            verdict, parts = "no more to do", [f"A step has no more to do than {file} says."]
        else:
            verdict, parts = "more to do", [self._by_line()]
        parts += [f"Less: {'; '.join(f'{each.counter} {each.change}' for each in self.less)}."] if self.less else []
        return "\n\n".join([f"### {markdown.code(self.name)}: {verdict}", *parts])

    def _by_line(self) -> str:
        rows: dict[str, list[tuple[str, str]]] = defaultdict(list)
        for each in self.more:
            operators = f" ({markdown.code(each.operators)})" if each.operators else ""
            for line in each.lines or ("",):
                rows[line].append((each.counter, each.change + operators))
        cells = [(markdown.code(line) if line else "—", *row) for line in rows for row in rows[line]]
        return markdown.table(["line", "what a step has more to do", "before → now"], cells)


class MoreWork(AssertionError):
    """A step has more to do than is written down."""


class CannotGuard(Exception):
    """A record that can't be read or written, or a script that is too short."""


def key() -> str:
    return f"{'.'.join(torch.__version__.split('.')[:2])} {device_class()}"


def read(file: Path) -> dict[str, Any]:
    """All that is written down; nothing where there is no file."""
    try:
        record = json.loads(Path(files.regular(file)).read_text(encoding="utf-8"))
        if has_form(record, {str: {str: STEP}}) and all(
            step.keys() >= {*PARTS} for steps in record.values() for step in steps.values()
        ):
            return record
        error: object = "it isn't a record of steps"
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, RecursionError) as fault:
        error = fault
    raise CannotGuard(f"{file} can't be read ({error}): restore it, or delete it to have it written anew")


def write(file: Path, name: str, entry: Mapping[str, Any]) -> None:
    """Replace a step's entry. Processes side by side take turns, and leave each other's entries as they are."""
    try:
        with files.locked(file.parent):
            record = read(file)
            record.setdefault(key(), {})[name] = entry
            files.write(file, _dumped(record) + "\n")
    except OSError as error:
        raise CannotGuard(f"{file} can't be written: {error.strerror}") from None


def _dumped(value: Any, depth: int = 0) -> str:
    """JSON, sorted, with a line for each number and for each line of source."""
    if not isinstance(value, dict) or depth == 4 or not value:
        return json.dumps(value, sort_keys=True, ensure_ascii=False)
    indent = " " * (depth + 1)
    rows = [f"{indent}{json.dumps(k, ensure_ascii=False)}: {_dumped(value[k], depth + 1)}" for k in sorted(value)]
    return "{\n" + ",\n".join(rows) + "\n" + " " * depth + "}"


def entry(counts: Counts) -> dict[str, Any]:
    """What is written down of a step."""
    lines: dict[str, dict[str, float]] = defaultdict(dict)
    for counter in COUNTERS:
        chains = _of(counts, counter)
        for text, number in inclusive(chains).items():
            if number and number >= SMALL * sum(chains.values()):
                lines[text][counter] = _rounded(number)
    names = {name: _rounded(number / counts.steps) for name, number in counts.operators.items()}
    numbers = counts.a_step() | {POSITIONS: counts.positions / counts.steps}
    return {name: _rounded(number) for name, number in numbers.items()} | {LINES: dict(lines), NAMES: names}


def _rounded(number: float) -> float:
    return int(number) if number == int(number) else round(number, 4)


def compare(
    old: Mapping, counts: Counts, allow: Mapping[str, float]
) -> tuple[tuple[Difference, ...], tuple[Difference, ...]]:
    """What is more than is written down, with the lines that have it done, and what is less.

    `allow` names shares of a counter by which it may grow, where it was 0 that much. A counter that isn't written down
    can't be more.
    """
    more: list[Difference] = []
    less: list[Difference] = []
    new = entry(counts)
    for counter in COUNTERS:
        was, now = old.get(counter), new[counter]
        # Where a batch has no more positions than before, its ids are other samples, which is no work.
        other_samples = counter == PADDING and not counts.masked and new[POSITIONS] <= old.get(POSITIONS, 0)
        if was is None or was == now or other_samples:
            continue
        change, operators = _change(counter, was, now), ""
        if counter == OPERATORS:
            differ = Counter(new[NAMES])
            differ.subtract(old[NAMES])
            most = sorted(filter(differ.get, differ), key=lambda name: -abs(differ[name]))[:NAMED]
            operators = ", ".join(f"{name} {differ[name]:+,.10g}" for name in most)
        if now > _most(counter, was, allow):
            more.append(
                Difference(counter, change, operators, _lines(old, counts, counter, (now - was) / max(now, 1e-9)))
            )
        elif was > _most(counter, now, allow):
            less.append(Difference(counter, change, operators))
    return tuple(more), tuple(less)


def _of(counts: Counts, counter: str) -> dict[Chain, float]:
    """A counter's number in a step by lines."""
    steps = 1 if counter == PEAK else counts.steps
    return {chain: number / steps for chain, number in counts.lines[counter].items()}


def _lines(old: Mapping, counts: Counts, counter: str, share: float) -> tuple[str, ...]:
    """The lines by which a counter has grown, of whose number this share is new."""
    counter = OPERATORS if counter == LAUNCHES else counter
    chains = _of(counts, counter)
    before = {text: numbers.get(counter, 0) for text, numbers in old[LINES].items()}
    places = {source(place): place for chain in chains for place in chain}
    named = growth(chains, before, share * sum(chains.values()))
    return tuple(f"{Path(places[t][0]).name}:{places[t][1]} {t.partition(': ')[2]}" for t in named)


def _most(counter: str, was: float, allow: Mapping[str, float]) -> float:
    """The most that isn't too much."""
    if counter in allow:
        return was + allow[counter] * max(was, 1)
    return was * (1 + SHARES.get(counter, 0)) + LEAST.get(counter, 0)


def _change(counter: str, was: float, now: float) -> str:
    if counter == PADDING:
        return f"{was:.0%} → {now:.0%}"
    base, units = (1024, _BYTES) if counter in (STORED, PEAK, MOVED) else (1000, _FLOPS if "FLOPs" in counter else [""])
    power = min(int(math.log(max(was, now, 1), base)), len(units) - 1)
    was, now = (round(number / base**power, 2 if number < 100 * base**power else None) for number in (was, now))
    return f"{was:,.10g} → {now:,.10g}{units[power]}{'' if counter == PEAK else ' a step'}"
