"""From a recorder's log to nested spans of time, to each module's times, and to the table of a profile.

Events of a step don't overlap, so its spans form a tree: the step; inside it forward and backward of calls; inside a
backward, recomputation by activation checkpointing. A span's self time is its duration without that of the spans inside
it. So the self times of all modules and of the step ("outside" of modules: loss, optimizer, data, autograd's own work)
add up to the step by construction.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pandas as pd

from ..lab.memory import MIB
from .meters import SavedBytes
from .recorder import END, SWITCH, Call, Entry, Run

STEP, FORWARD, BACKWARD, RECOMPUTE = "step", "forward", "backward", "recompute"
KINDS = (FORWARD, BACKWARD, RECOMPUTE)
MEMORY = ("activation_mib", "peak_mib", "backward_peak_mib")


@dataclass
class Span:
    """`begin` and `end` are indices of log entries, `parent` is the index of the enclosing span (−1: none)."""

    kind: str
    module: int  # −1: the step
    begin: int
    end: int
    parent: int


@dataclass
class Step:
    """A profiled step. It has spans and times once its marks have been read."""

    number: int
    saved: SavedBytes | None = None  # of a warm-up step only, as are the levels
    levels: list[tuple[float, float]] = field(default_factory=list)  # for each entry: now, peak since the last
    log: list[Entry] = field(default_factory=list)
    times_ns: np.ndarray | None = None  # of each entry
    spans: list[Span] = field(default_factory=list)

    def read(self, times_ns: np.ndarray) -> None:
        """Make spans of the log, and drop it."""
        self.times_ns, self.spans, self.log = times_ns, spans(self.log), []


@dataclass
class _Open:
    """A span that has not ended: its index, and the call and the run of a backward span."""

    index: int
    call: Call | None = None
    run: Run | None = None


class _Builder:
    def __init__(self, last: int) -> None:
        self.spans = [Span(STEP, -1, 0, last, -1)]
        self.open = [_Open(0)]  # outermost first
        self.finished: dict[Run, int] = {}  # runs whose last node has run, and the entry that says so

    def add(self, at: int, entry: Entry) -> None:
        what = entry[0]
        if what == END:
            if self.open[-1].run is entry[3]:
                self.finished[entry[3]] = at  # closed later: gradients may still be accumulated
            return
        self.close_finished()
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
                self.pop(at - 1)  # an exception ended that backward at its last entry
        self.push(kind, module, at)

    def leave(self, at: int, module: int) -> None:
        if any(self.spans[span.index].module == module and span.run is None for span in self.open):
            while self.top.module != module or self.open[-1].run is not None:
                self.pop(at)
            self.pop(at)

    def switch(self, at: int, run: Run, call: Call | None) -> None:
        """Close the run's backward spans that don't enclose the call, and open those that do."""
        if any(span.run is run for span in self.open):
            while self.open[-1].run is not run:
                self.pop(at)
        path = []
        while call is not None:
            path.append(call)
            call = call.parent
        while self.open[-1].run is run and self.open[-1].call not in path:
            self.pop(at)
        inside = path.index(self.open[-1].call) if self.open[-1].run is run else len(path)
        for missing in reversed(path[:inside]):
            self.push(BACKWARD, missing.module, at, missing, run)

    @property
    def top(self) -> Span:
        return self.spans[self.open[-1].index]

    def push(self, kind: str, module: int, at: int, call: Call | None = None, run: Run | None = None) -> None:
        self.spans.append(Span(kind, module, at, at, self.open[-1].index))
        self.open.append(_Open(len(self.spans) - 1, call, run))

    def pop(self, at: int) -> None:
        self.top.end = at
        self.open.pop()

    def close_finished(self) -> None:
        while (run := self.open[-1].run) in self.finished:
            while self.open[-1].run is run:
                self.pop(self.finished[run])
            del self.finished[run]


def spans(log: Sequence[Entry]) -> list[Span]:
    """The spans of a step, parents before what they contain. The first and the last entry are the step's ends."""
    last = len(log) - 1
    builder = _Builder(last)
    for at in range(1, last):
        builder.add(at, log[at])
    builder.close_finished()
    while len(builder.open) > 1:
        builder.pop(last - 1)
    return builder.spans


@dataclass(frozen=True)
class Tally:
    """Milliseconds of one step by kind and module; `total_ms` includes the modules that a module calls.

    Time within a module's backward that recomputes counts as `RECOMPUTE` only.
    """

    step_ms: float
    outside_ms: float
    calls: np.ndarray  # (modules,), in forward
    self_ms: dict[str, np.ndarray]  # by kind, (modules,) each
    total_ms: dict[str, np.ndarray]


def tally(step: Step, modules: int) -> Tally:
    durations = np.array([step.times_ns[span.end] - step.times_ns[span.begin] for span in step.spans]) / 1e6
    exclusive = durations.copy()  # of each span, without the spans inside it
    for span, duration in zip(step.spans[1:], durations[1:], strict=True):
        exclusive[span.parent] -= duration
    calls = np.zeros(modules, int)
    self_ms = {kind: np.zeros(modules) for kind in KINDS}
    total_ms = {kind: np.zeros(modules) for kind in KINDS}
    for index, span in enumerate(step.spans[1:], 1):
        calls[span.module] += span.kind == FORWARD
        self_ms[span.kind][span.module] += exclusive[index]
        for module in _enclosing_modules(step.spans, index):
            total_ms[span.kind][module] += exclusive[index]
    return Tally(float(durations[0]), float(exclusive[0]), calls, self_ms, total_ms)


def _enclosing_modules(tree: Sequence[Span], index: int) -> set[int]:
    """The modules of a span and of the spans of its kind around it; once each, even if a module calls itself."""
    kind, modules = tree[index].kind, set()
    while index > 0:
        if tree[index].kind == kind:
            modules.add(tree[index].module)
        index = tree[index].parent
    return modules


def rises(tree: Sequence[Span], levels: np.ndarray, peaks: np.ndarray, modules: int) -> dict[str, np.ndarray]:
    """Peak memory in a span above the level at its beginning, by kind and module: the maximum over its calls.

    `levels` are those at the log's entries, `peaks` the highest since the entry before.
    """
    unknown_or_0 = 0.0 * peaks[0]  # NaN where peaks are not known
    highest = {kind: np.full(modules, unknown_or_0) for kind in (FORWARD, BACKWARD)}
    for span in tree[1:]:
        if span.kind in highest and span.end > span.begin:
            rise = peaks[span.begin + 1 : span.end + 1].max() - levels[span.begin]
            highest[span.kind][span.module] = np.maximum(highest[span.kind][span.module], rise)
    return highest


def summary(
    recorded: Sequence[Step], warmup: Step | None, paths: list[str], types: list[str], median_of_parts: bool = False
) -> pd.DataFrame:
    """The table of a profile. Times are means over the steps between the 20th and the 80th percentile.

    Means over the same steps add up, which medians of parts don't; like a median, this ignores a few odd steps. With
    `median_of_parts` each time is its own median over all steps: a stall within one module of one step is ignored.
    """
    tallies = [tally(step, len(paths)) for step in recorded]
    p20, median, p80 = np.percentile([step.step_ms for step in tallies], [20, 50, 80])
    middle = [step for step in tallies if p20 <= step.step_ms <= p80] or tallies  # of two, both

    def mean(of: Callable[[Tally], Any]) -> Any:
        if median_of_parts:
            return np.median([of(step) for step in tallies], axis=0)
        return np.mean([of(step) for step in middle], axis=0)

    table = pd.DataFrame({"module": paths, "type": types, "calls": mean(lambda step: step.calls)})
    names = [f"{kind}_ms" for kind in KINDS]
    table[names] = mean(lambda step: [step.total_ms[kind] for kind in KINDS]).T
    table["total_ms"] = mean(lambda step: sum(step.total_ms.values()))
    table["self_ms"] = mean(lambda step: sum(step.self_ms.values()))
    step_ms, outside_ms = float(mean(lambda step: step.step_ms)), float(mean(lambda step: step.outside_ms))
    inside = dict(zip(names, mean(lambda step: [step.self_ms[kind].sum() for kind in KINDS]), strict=True))
    sums = [
        {"module": "outside", "type": "", "total_ms": outside_ms, "self_ms": outside_ms},
        {"module": "step", "type": "", **inside, "total_ms": step_ms, "self_ms": step_ms},
    ]
    table = pd.concat([table, pd.DataFrame(sums)], ignore_index=True)
    table["share"] = table["total_ms"] / step_ms
    for column, values in _memory(warmup, len(paths)).items():
        table[column] = values
    table.attrs = {"steps": len(recorded), "median_ms": float(median), "p20_ms": float(p20), "p80_ms": float(p80)}
    return table


def _memory(warmup: Step | None, modules: int) -> dict[str, list[float]]:
    """The columns of memory, for the modules, outside and the step; NaN without a warm-up step."""
    if warmup is None:
        return {column: [np.nan] * (modules + 2) for column in MEMORY}
    columns = {"activation_mib": [*warmup.saved.module_bytes, np.nan, warmup.saved.total_bytes]}
    levels, peaks = np.array(warmup.levels, float).T
    risen = rises(warmup.spans, levels, peaks, modules)
    columns["peak_mib"] = [*risen[FORWARD], np.nan, peaks[1:].max() - levels[0]]
    columns["backward_peak_mib"] = [*risen[BACKWARD], np.nan, np.nan]
    return {column: (np.array(values) / MIB).tolist() for column, values in columns.items()}
