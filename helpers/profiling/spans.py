"""From a recorder's log to nested spans of time, from these to each module's times, and to the table of a profile.

All that happened in a step happened one after another, so the spans of a step form a tree: the step; in it forward
calls; backward stretches; in a backward, what activation checkpointing computes again. A span's own time is its
duration less that of the spans in it. So the own times of all modules, and the step's own ("outside" of modules: loss,
optimizer, data, what autograd does between), add up to the step by construction.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pandas as pd

from helpers.lab.memory import MIB

from .meters import SavedBytes
from .recorder import END, SWITCH, Call, Entry, Run

STEP, FORWARD, BACKWARD, RECOMPUTE = "step", "forward", "backward", "recompute"
KINDS = (FORWARD, BACKWARD, RECOMPUTE)
MEMORY = ("activation_mib", "peak_mib", "backward_peak_mib")


@dataclass
class Span:
    """From one entry of the log to another; `parent` is the index of the span around it (−1: none)."""

    kind: str
    module: int  # −1: the step
    begin: int
    end: int
    parent: int


@dataclass
class Step:
    """A watched step. Spans and times are there once its marks have been read."""

    number: int
    saved: SavedBytes | None = None  # of a warm-up step, as are the levels
    levels: list[tuple[float, float]] = field(default_factory=list)  # at each entry: now, the most since the one before
    log: list[Entry] = field(default_factory=list)
    times_ns: np.ndarray | None = None  # of each entry
    spans: list[Span] = field(default_factory=list)

    def read(self, times_ns: np.ndarray) -> None:
        """Make spans of the log, which is not needed any more then."""
        self.times_ns, self.spans, self.log = times_ns, spans(self.log), []


@dataclass
class _Open:
    """A span that is open: its index, and the call and the run if it is one of backward."""

    index: int
    call: Call | None = None
    run: Run | None = None


class _Builder:
    def __init__(self, last: int) -> None:
        self.spans = [Span(STEP, -1, 0, last, -1)]
        self.open = [_Open(0)]  # outermost first
        self.over: dict[Run, int] = {}  # runs whose last node has run, and the entry at which it had

    def add(self, at: int, entry: Entry) -> None:
        what = entry[0]
        if what == END:
            if self.open[-1].run is entry[3]:
                self.over[entry[3]] = at  # not closed yet: gradients may still be added up
            return
        self.close_what_is_over()
        if what == SWITCH:
            self.switch(at, entry[3], entry[3].owner(entry[2]))
        elif what >= 0:
            self.enter(at, *entry)
        else:
            self.leave(at, ~what)

    def enter(self, at: int, module: int, mark: Any, number: int, backward: int | None = None) -> None:
        kind = self.top.kind  # a call within a call is of its kind
        if backward is not None:
            kind = FORWARD if backward < 0 else RECOMPUTE
            while kind == FORWARD and self.top.kind in (BACKWARD, RECOMPUTE):
                self.pop(at - 1)  # an exception ended that backward when it was last heard of
        self.push(kind, module, at)

    def leave(self, at: int, module: int) -> None:
        if any(self.spans[one.index].module == module and one.run is None for one in self.open):
            while self.top.module != module or self.open[-1].run is not None:
                self.pop(at)
            self.pop(at)

    def switch(self, at: int, run: Run, call: Call | None) -> None:
        """Close the backward spans of the run that the call doesn't lie in, and open those that it lies in."""
        if any(one.run is run for one in self.open):
            while self.open[-1].run is not run:
                self.pop(at)
        path = []
        while call is not None:
            path.append(call)
            call = call.parent
        while self.open[-1].run is run and self.open[-1].call not in path:
            self.pop(at)
        inside = path.index(self.open[-1].call) if self.open[-1].run is run else len(path)
        for one in reversed(path[:inside]):
            self.push(BACKWARD, one.module, at, one, run)

    @property
    def top(self) -> Span:
        return self.spans[self.open[-1].index]

    def push(self, kind: str, module: int, at: int, call: Call | None = None, run: Run | None = None) -> None:
        self.spans.append(Span(kind, module, at, at, self.open[-1].index))
        self.open.append(_Open(len(self.spans) - 1, call, run))

    def pop(self, at: int) -> None:
        self.top.end = at
        self.open.pop()

    def close_what_is_over(self) -> None:
        while (run := self.open[-1].run) in self.over:
            while self.open[-1].run is run:
                self.pop(self.over[run])
            del self.over[run]


def spans(log: Sequence[Entry]) -> list[Span]:
    """The spans of a step, parents before what they contain. The first and the last entry are the step's ends."""
    last = len(log) - 1
    builder = _Builder(last)
    for at in range(1, last):
        builder.add(at, log[at])
    builder.close_what_is_over()
    while len(builder.open) > 1:
        builder.pop(last - 1)
    return builder.spans


@dataclass(frozen=True)
class Tally:
    """Milliseconds of one step by kind and module. `own` leaves out what was called; `whole` counts it.

    `whole` counts a kind's time alone: what is computed again within a module's backward is `RECOMPUTE`'s.
    """

    step_ms: float
    outside_ms: float
    calls: np.ndarray  # (modules,), in forward
    own: dict[str, np.ndarray]  # (modules,) each
    whole: dict[str, np.ndarray]


def tally(step: Step, modules: int) -> Tally:
    found = step.spans
    durations = np.array([step.times_ns[span.end] - step.times_ns[span.begin] for span in found]) / 1e6
    owns = durations.copy()
    for span, duration in zip(found[1:], durations[1:], strict=True):
        owns[span.parent] -= duration
    calls = np.zeros(modules, int)
    own = {kind: np.zeros(modules) for kind in KINDS}
    whole = {kind: np.zeros(modules) for kind in KINDS}
    for index, span in enumerate(found[1:], 1):
        calls[span.module] += span.kind == FORWARD
        own[span.kind][span.module] += owns[index]
        for module in _around(found, index):
            whole[span.kind][module] += owns[index]
    return Tally(float(durations[0]), float(owns[0]), calls, own, whole)


def _around(found: Sequence[Span], index: int) -> set[int]:
    """The modules of the spans of its kind that a span lies in, its own too; once each, even one that calls itself."""
    kind, modules = found[index].kind, set()
    while index > 0:
        if found[index].kind == kind:
            modules.add(found[index].module)
        index = found[index].parent
    return modules


def rises(found: Sequence[Span], levels: np.ndarray, peaks: np.ndarray, modules: int) -> dict[str, np.ndarray]:
    """How far the level of memory rose in a span above where it began, by kind and module, the highest of its calls.

    `levels` are those at the log's entries, `peaks` the highest since the entry before.
    """
    none = 0.0 * peaks[0]  # NaN where peaks are not known
    highest = {kind: np.full(modules, none) for kind in (FORWARD, BACKWARD)}
    for span in found[1:]:
        if span.kind in highest and span.end > span.begin:
            rise = peaks[span.begin + 1 : span.end + 1].max() - levels[span.begin]
            highest[span.kind][span.module] = np.maximum(highest[span.kind][span.module], rise)
    return highest


def summary(recorded: Sequence[Step], weighed: Step | None, paths: list[str], types: list[str]) -> pd.DataFrame:
    """Times are means over the middle steps, those not shorter than the 20th nor longer than the 80th percentile.

    Means over the same steps add up; medians of parts don't add up to the median of the whole. Like a median, this
    doesn't mind a few odd steps.
    """
    tallies = [tally(step, len(paths)) for step in recorded]
    durations = np.array([one.step_ms for one in tallies])
    p20, median, p80 = np.percentile(durations, [20, 50, 80])
    middle = [one for one in tallies if p20 <= one.step_ms <= p80] or tallies  # of two, both

    def mean(of: Callable[[Tally], Any]) -> Any:
        return np.mean([of(one) for one in middle], axis=0)

    table = pd.DataFrame({"module": paths, "type": types, "calls": mean(lambda one: one.calls)})
    for kind in KINDS:
        table[f"{kind}_ms"] = mean(lambda one, kind=kind: one.whole[kind])
    table["total_ms"] = mean(lambda one: sum(one.whole.values()))
    table["self_ms"] = mean(lambda one: sum(one.own.values()))
    step_ms, outside_ms = float(mean(lambda one: one.step_ms)), float(mean(lambda one: one.outside_ms))
    inside = {f"{kind}_ms": float(mean(lambda one, kind=kind: one.own[kind].sum())) for kind in KINDS}
    sums = [
        {"module": "outside", "type": "", "total_ms": outside_ms, "self_ms": outside_ms},
        {"module": "step", "type": "", **inside, "total_ms": step_ms, "self_ms": step_ms},
    ]
    table = pd.concat([table, pd.DataFrame(sums)], ignore_index=True)
    table["share"] = table["total_ms"] / step_ms
    for column, values in _memory(weighed, len(paths)).items():
        table[column] = values
    table.attrs = {"steps": len(recorded), "median_ms": float(median), "p20_ms": float(p20), "p80_ms": float(p80)}
    return table


def _memory(weighed: Step | None, modules: int) -> dict[str, list[float]]:
    """The columns of memory, for the modules, outside and the step."""
    if weighed is None:
        return {column: [np.nan] * (modules + 2) for column in MEMORY}
    columns = {"activation_mib": [*weighed.saved.module_bytes, np.nan, weighed.saved.total_bytes]}
    levels, peaks = np.array(weighed.levels, float).T
    risen = rises(weighed.spans, levels, peaks, modules)
    columns["peak_mib"] = [*risen[FORWARD], np.nan, peaks[1:].max() - levels[0]]
    columns["backward_peak_mib"] = [*risen[BACKWARD], np.nan, np.nan]
    return {column: (np.array(values) / MIB).tolist() for column, values in columns.items()}
