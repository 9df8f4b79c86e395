"""Findings from the observation of the unprofiled loop (`observe`): shares of its wall time, by line and activity."""

import itertools
import linecache
import statistics
from collections import Counter, defaultdict
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from .. import observe
from ..diagnosis import BOUND, MEASURED, Finding, Line, milliseconds
from ..trace import Note
from . import LOADER_WAITS

EVALUATION, CHECKPOINTS, DRAWN, LOGGED = "evaluation", "checkpoints", "drawing", "logging"
RECOMPILED, PADDING, LOOP = "compiling", "padding", "Python loop"
GARBAGE, GROWTH = "garbage collection", "growing memory"
LATE, RECOMPUTED, REPEATED, SMALL = "late rank", "recomputed activations", "repeated backward", "small batches"
ANOMALY = "anomaly detection"
FIRST = (GROWTH, LATE, ANOMALY)  # warnings that come before any finding
MICRO_BATCHES = 8  # of a step, from which on fewer and larger ones are advised
LEAST_ITERATIONS = 5
LEAST_PADDING = 0.05
LOOP_CALLS = 200  # of a user's function in an iteration, from which on its lines are a loop's
LOOP_SHARE = 0.1
LEAST_BACKWARD = 0.01
GROWS = 16 * 2**20  # bytes that a process may grow by
_ADVICE = {
    observe.EVALUATING: (EVALUATION, "evaluate less often, on fewer samples or in larger batches, and under no_grad"),
    observe.SAVING: (CHECKPOINTS, "save less often, or in a thread of its own from a copy on the host"),
    observe.DRAWING: (DRAWN, "draw every n-th time, and after the training from what was logged"),
    observe.LOGGING: (LOGGED, "log every n-th iteration"),
    observe.RECOMPUTING: (RECOMPUTED, "save the activations where memory allows it: checkpoint fewer blocks, or none"),
    observe.COMPILING: (RECOMPILED, "keep shapes and Python numbers constant, or torch.compile(…, dynamic=True)"),
}


class Observed:
    """What `Observer.data` saw, as findings and notes. Nothing of fewer than `LEAST_ITERATIONS` iterations.

    `gone_back` tells how a recorded backward pass is shared among functions, by file and name.
    """

    def __init__(self, data: dict[str, Any], gone_back: Mapping[tuple[str, str], float] | None = None) -> None:
        self.data, self.gone_back = data, gone_back or {}
        self.iterations: list[float] = data["iterations"]
        self.total = max(data["seconds"], 1e-9)
        self.enough = len(self.iterations) >= LEAST_ITERATIONS and self.total > 0
        self.step_ms = statistics.fmean(self.iterations) * 1e3 if self.iterations else 0.0
        self.activities: Counter[str] = Counter()
        for *_, activity, seconds, _calls in data["lines"]:
            self.activities[activity] += seconds / self.total

    @property
    def outside(self) -> float:
        """The share of the wall time that no recorded window holds: windows are of single iterations."""
        return sum(self.activities[name] for name in (observe.EVALUATING, observe.SAVING, observe.DRAWING))

    def lines(self, most: int = 3) -> list[Line]:
        """The user's dearest lines."""
        by_line: dict[tuple[str, int], Any] = defaultdict(Counter)
        for file, line, _, activity, seconds, _calls in self.data["lines"]:
            by_line[file, line][activity] += seconds / self.total
        dearest = sorted(by_line.items(), key=lambda item: -item[1].total())[:most]
        return [
            Line(place(file, line), source(file, line), shares.most_common(1)[0][0], shares.total())
            for (file, line), shares in dearest
        ]

    def text(self) -> list[str]:
        """What was seen, in lines, where there is no profile to go with it."""
        if not self.iterations:
            return []
        median = milliseconds(statistics.median(self.iterations) * 1e3)
        lines = [f"{len(self.iterations)} iterations were seen, median {median}"]
        lines += [f"  {line.share:4.0%}  {line.where}  {line.source}  ({line.activity})" for line in self.lines()]
        found = sorted(self.findings(0.01), key=lambda finding: -finding.gain_share)
        return lines + [f"{f.finding}: {f.gain}; {f.where}; {f.advice}" for f in found]

    def findings(self, least: float) -> list[Finding]:
        if not self.enough:
            return []
        found = [*self._of_activities(), *self._loader(), *self._loops(), *self._padding(), *self._garbage()]
        found += self._backwards()
        return [finding for finding in found if finding.gain_share >= least]

    def _finding(
        self, name: str, share: float, where: str, evidence: str, advice: str, sure: str = MEASURED
    ) -> Finding:
        return Finding(name, "observed", share * self.step_ms, share, where, evidence, advice, sure)

    def _dearest(self, of: str) -> str:
        """The dearest line of an activity."""
        lines: Counter[tuple[str, int]] = Counter()
        for file, line, _, activity, seconds, _calls in self.data["lines"]:
            if activity == of:
                lines[file, line] += seconds
        return _at(*max(lines, key=lines.__getitem__))

    def _of_activities(self) -> list[Finding]:
        found = []
        for activity, (name, advice) in _ADVICE.items():
            share = self.activities[activity]
            if not share:
                continue
            evidence = f"{share:.0%} of the time of {len(self.iterations)} iterations"
            if activity == observe.COMPILING and self.data["recompiles"]:
                evidence += f"; compiled again because {self.data['recompiles'][-1]}"
            sure = BOUND if activity == observe.EVALUATING and self.data["evaluations"] < 2 else MEASURED
            found.append(self._finding(name, share, self._dearest(activity), evidence, advice, sure))
        return found

    def _loader(self) -> list[Finding]:
        waits, inside = self.activities[observe.LOADING], self.activities[observe.DATASET]
        if waits + inside < LEAST_PADDING:
            return []
        where = self._dearest(observe.DATASET if inside else observe.LOADING)
        evidence = f"{waits + inside:.0%} of the time until a batch is there"
        advice = "more workers or a larger prefetch_factor; do less for each sample"
        if inside:
            evidence += f", {inside:.0%} of it in the dataset's own lines, in the process that trains"
            advice = "give the DataLoader num_workers and persistent_workers; do once what doesn't change by epoch"
        elif workers := self.data.get("workers"):
            file, line, seconds = workers[0]
            where = _at(file, line)
            evidence += f"; that line has {seconds / sum(each for *_, each in workers):.0%} of the workers' time"
        return [self._finding(LOADER_WAITS, waits + inside, where, evidence, advice)]

    def _loops(self) -> list[Finding]:
        """Functions of the user's that make many small calls: a loop that could be one call on a batch."""
        functions: dict[tuple[str, str], Any] = defaultdict(Counter)
        calls: dict[tuple[str, str], int] = {}
        for file, line, name, activity, seconds, made in self.data["lines"]:
            if activity == observe.COMPUTING and made >= LOOP_CALLS:
                functions[file, name][line] += seconds / self.total
                calls[file, name] = made
        found = []
        for (file, name), lines in functions.items():
            (line, _), share = lines.most_common(1)[0], lines.total()
            if share < LOOP_SHARE:
                continue
            evidence = f"{calls[file, name]:,} calls an iteration from {name}, {share:.0%} of the time"
            back = sum((part for (path, of), part in self.gone_back.items() if of == name and file.endswith(path)), 0.0)
            back *= self.activities[observe.BACKWARD]
            if back >= LEAST_BACKWARD:
                evidence += f", and {back:.0%} for their backward pass"
                share += back
            advice = "do for all elements at once what the loop does one by one: an index, a mask, a batch"
            found.append(self._finding(LOOP, share, _at(file, line), evidence, advice, BOUND))
        return found

    def _padding(self) -> list[Finding]:
        if not self.data["padding"]:
            return []
        positions, padded, shared = self.data["padding"]
        training = self.activities[observe.COMPUTING] + self.activities[observe.BACKWARD]
        if padded / positions < LEAST_PADDING:
            return []
        dynamic = shared >= LEAST_PADDING * positions
        share = padded / positions * training
        evidence = f"{padded / positions:.0%} of the positions that embeddings get are constant ends of rows"
        evidence += f", {shared / positions:.0%} beyond the longest sample of their batch" if dynamic else ""
        advice = "pad to the longest sample of the batch, and " if dynamic else ""
        advice += "put samples of nearly one length into a batch, or pack them"
        return [self._finding(PADDING, share, "the collate function or the tokenizer", evidence, advice, BOUND)]

    def _garbage(self) -> list[Finding]:
        share = self.data["garbage_s"] / self.total
        evidence = f"{share:.0%} of the time in Python's collector of cycles"
        asked = next((line for line in self.data["lines"] if "gc.collect" in source(line[0], line[1])), None)
        where = _at(*asked[:2]) if asked else "wherever objects are made"
        advice = "collect every n-th epoch, if at all" if asked else "gc.freeze() after the set-up"
        return [self._finding(GARBAGE, share, where, evidence, advice)]

    def _backwards(self) -> list[Finding]:
        """Several backward passes in an iteration: through one graph, or of micro-batches."""
        each = self.data["backwards"] / len(self.iterations)
        if not self.activities[observe.BACKWARD] or each < 1.5:
            return []
        where = self._dearest(observe.BACKWARD)
        if self.data["retained"] >= 0.5 * len(self.iterations):
            share = self.activities[observe.BACKWARD] * (1 - 1 / each)
            evidence = f"{each:.3g} backward passes an iteration, and the graph is kept for the next"
            return [self._finding(REPEATED, share, where, evidence, "add the losses, one backward", BOUND)]
        if each < MICRO_BATCHES:
            return []
        share = (self.activities[observe.BACKWARD] + self.activities[observe.COMPUTING]) * (1 - 1 / each)
        evidence = f"{each:.3g} micro-batches an iteration"
        advice = "larger micro-batches, fewer of them: as many samples as memory holds"
        return [self._finding(SMALL, share, where, evidence, advice, BOUND)]

    def warnings(self) -> list[Note]:
        grown = growth(self.data["memory"], self.data["device_bytes"])
        warnings = [Note(GROWTH, grown)] if grown else []
        if self.data["anomaly"]:
            text = "anomaly detection is on, which notes a traceback for each operation and checks each gradient"
            warnings.append(Note(ANOMALY, f"{text}: switch it off when no NaN is looked for"))
        return warnings

    def notes(self) -> list[Note]:
        if not self.enough:
            return []
        notes = []
        median = statistics.median(self.iterations)
        slow = [(seconds, what) for seconds, what in self.data["slowest"] if seconds > 3 * median]
        if slow and len(self.iterations) > 2 * len(slow):
            longest, what = slow[0]
            text = f"the slowest of {len(self.iterations)} iterations took {milliseconds(longest * 1e3)}"
            notes.append(Note("slowest", f"{text}, the median {milliseconds(median * 1e3)}; mostly {what}"))
        if not self.data["epochs"] and not self.data["evaluations"]:
            text = "no epoch ended while the loop was observed, so what follows one isn't in these shares"
            notes.append(Note("epoch", f"{text}; --until-epoch waits for it"))
        return notes


def growth(memory: list[list[int]], device_bytes: int) -> str:
    """In words: the memory that every iteration adds, of the second half of what was observed; "" if it stays."""
    later = memory[len(memory) // 2 :]
    if len(later) < 4:
        return ""
    for column, name in ((2, "the device"), (1, "the process")):
        counts, sizes = [row[0] for row in later], [row[column] for row in later]
        slope, _ = statistics.linear_regression(counts, sizes)
        rising = sum(after > before for before, after in itertools.pairwise(sizes))
        if sizes[-1] - sizes[0] > GROWS and rising >= 0.7 * (len(sizes) - 1):
            text = f"memory of {name} grows by {slope / 2**20:.1f} MiB an iteration"
            if column == 2 and device_bytes:
                text += f", and is full after {max(device_bytes - sizes[-1], 0) / slope:,.0f} more"
            return text + ": something keeps each iteration's graph or outputs; keep loss.detach(), or a number"
    return ""


def late_rank(ranks: dict[int, dict[str, Any]]) -> list[Note]:
    """The rank whose own work, outside of backward and collectives, takes longest: the others wait for it."""
    own = {}
    for rank, data in ranks.items():
        waiting = sum(line[4] for line in data["lines"] if line[3] in (observe.BACKWARD, observe.COMMUNICATING))
        iterations = max(len(data["iterations"]), 1)
        own[rank] = (data["seconds"] - waiting) / iterations * 1e3
    if len(own) < 2:
        return []
    last = max(own, key=own.__getitem__)
    others = statistics.median(ms for rank, ms in own.items() if rank != last)
    step_ms = statistics.median(ranks[last]["iterations"] or [0.0]) * 1e3
    if own[last] - others < 0.1 * step_ms:
        return []
    line = Observed(ranks[last]).lines(1)
    where = f", most at {line[0].where}" if line else ""
    text = f"rank {last} is late: {milliseconds(own[last])} an iteration of its own work{where}"
    return [Note(LATE, f"{text}; the others' take {milliseconds(others)} and wait for it")]


def place(file: str, line: int) -> str:
    return f"{Path(file).name}:{line}"


def source(file: str, line: int) -> str:
    return " ".join(linecache.getline(file, line).split())


def _at(file: str, line: int) -> str:
    return "  ".join(filter(None, [place(file, line), source(file, line)]))
