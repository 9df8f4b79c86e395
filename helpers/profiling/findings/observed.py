"""Findings from the observation of the unprofiled loop (`observe`): shares of its wall time, by line and activity."""

import itertools
import linecache
import statistics
from collections import defaultdict
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pandas as pd

from ...faults import remedy
from ...watching import observe
from ..diagnosis import BOUND, MEASURED, Finding, Line, milliseconds
from ..trace import Note

# Seen by the host's clock, on which a wait for the device counts, too
OF_HOST = {"Python loop", "garbage collection"}
MICRO_BATCHES = 8  # of a step, from which on fewer and larger ones are advised
LEAST_ITERATIONS = 5
LEAST_PADDING = 0.05
LOOP_CALLS = 200  # of a user's function in an iteration, from which on its lines are a loop's
LOOP_SHARE = 0.1
LEAST_BACKWARD = 0.01
DEAR, MULTIPLIES = 0.2, 0.2  # shares: of a line in the time, and of products in a line that is a model's
BUSY = 0.2  # cores that others use
GROWS = 16 * 2**20  # bytes that a process may grow by
_ACTIVITIES = {
    observe.EVALUATING: "evaluation",
    observe.SAVING: "checkpoints",
    observe.DRAWING: "drawing",
    observe.LOGGING: "logging",
    observe.RECOMPUTING: "recomputed activations",
    observe.COMPILING: "compiling",
}


class Observed:
    """What `Observer.data` saw, as findings and notes. Nothing of fewer than `LEAST_ITERATIONS` iterations.

    `gone_back` tells how a recorded backward pass is shared among functions, by file and name.
    """

    def __init__(self, data: dict[str, Any], gone_back: Mapping[tuple[str, str], float] | None = None) -> None:
        self.data, self.gone_back = data, gone_back or {}
        self.iterations: list[float] = data["iterations"]
        self.total = max(data["seconds"], 1e-9)
        self.enough = len(self.iterations) >= LEAST_ITERATIONS
        self.step_ms = statistics.fmean(self.iterations) * 1e3 if self.iterations else 0.0
        self.seen = pd.DataFrame(data["lines"], columns=["file", "line", "function", "activity", "seconds", "calls"])
        self.seen["share"] = self.seen["seconds"].astype(float) / self.total
        self.activities = defaultdict(float, self.seen.groupby("activity")["share"].sum())

    @property
    def outside(self) -> float:
        """The share of the wall time that no recorded window holds: windows are of single iterations."""
        return sum(self.activities[name] for name in (observe.EVALUATING, observe.SAVING, observe.DRAWING))

    def lines(self, most: int = 3) -> list[Line]:
        """The user's dearest lines."""
        by_line = self.seen.groupby(["file", "line"]).agg({"activity": "first", "share": "sum"})  # first: its dearest
        return [
            Line(place(*at), source(*at), line["activity"], line["share"])
            for at, line in by_line.nlargest(most, "share").iterrows()
        ]

    def dear_line(self, products: Mapping[str, float]) -> tuple[str, float]:
        """The line that computes longest of those that hardly multiply matrices, by the products in each; its share."""
        lines = _by_line(self.seen[self.seen["activity"] == observe.COMPUTING]) if self.enough else {}
        dear = ((place(*at), share) for at, share in lines.items() if share >= DEAR)
        return next(((at, share) for at, share in dear if products.get(at, 0.0) < MULTIPLIES), ("", 0.0))

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
        rules = (self._doing, self._loader, self._loops, self._padding, self._garbage, self._backwards, self._unclaimed)
        return [finding for rule in rules for finding in rule() if finding.gain_share >= least]

    def _finding(
        self, name: str, share: float, where: str, evidence: str, sure: str = MEASURED, case: str = ""
    ) -> Finding:
        return Finding(name, "observed", share * self.step_ms, share, where, evidence, remedy(name, case), sure)

    def _dearest(self, activity: str) -> str:
        """The dearest line of an activity."""
        return _at(*_by_line(self.seen[self.seen["activity"] == activity]).index[0])

    def _doing(self) -> Iterator[Finding]:
        for activity, fault in _ACTIVITIES.items():
            if share := self.activities[activity]:
                evidence = f"{share:.0%} of the time of {len(self.iterations)} iterations"
                if activity == observe.COMPILING and self.data["recompiles"]:
                    evidence += f"; compiled again because {self.data['recompiles'][-1]}"
                sure = BOUND if activity == observe.EVALUATING and self.data["evaluations"] < 2 else MEASURED
                yield self._finding(fault, share, self._dearest(activity), evidence, sure)

    def _loader(self) -> Iterator[Finding]:
        waits, inside = self.activities[observe.LOADING], self.activities[observe.DATASET]
        if waits + inside < LEAST_PADDING:
            return
        evidence = f"{waits + inside:.0%} of the time until a batch is there"
        workers = self.data.get("workers", [])
        if inside:
            where = self._dearest(observe.DATASET)
            evidence += f", {inside:.0%} of it in the dataset's own lines, in the process that trains"
            case = "in the dataset"
        else:
            where, case = self._dearest(observe.LOADING), "observed"
            if workers:
                file, line, seconds = workers[0]
                where = _at(file, line)
                evidence += f"; that line has {seconds / sum(each for *_, each in workers):.0%} of the workers' time"
        yield self._finding("waiting for the loader", waits + inside, where, evidence, case=case)

    def _loops(self) -> Iterator[Finding]:
        """Functions of the user's that make many small calls: a loop that could be one call on a batch."""
        looping = self.seen[(self.seen["activity"] == observe.COMPUTING) & (self.seen["calls"] >= LOOP_CALLS)]
        for (file, name), lines in looping.groupby(["file", "function"]):
            share = lines["share"].sum()
            if share < LOOP_SHARE:
                continue
            evidence = f"{lines['calls'].max():,} calls an iteration from {name}, {share:.0%} of the time"
            back = sum(part for (path, of), part in self.gone_back.items() if of == name and file.endswith(path))
            back *= self.activities[observe.BACKWARD]
            if back >= LEAST_BACKWARD:
                evidence += f", and {back:.0%} for their backward pass"
                share += back
            yield self._finding("Python loop", share, _at(*_by_line(lines).index[0]), evidence, BOUND)

    def _padding(self) -> Iterator[Finding]:
        positions, padded, shared = self.data["padding"] or (1, 0, 0)
        if padded / positions < LEAST_PADDING:
            return
        share = padded / positions * (self.activities[observe.COMPUTING] + self.activities[observe.BACKWARD])
        evidence = f"{padded / positions:.0%} of the positions that embeddings get are constant ends of rows"
        case = ""
        if shared >= LEAST_PADDING * positions:
            evidence += f", {shared / positions:.0%} beyond the longest sample of their batch"
            case = "fixed"
        where = "the collate function or the tokenizer"
        yield self._finding("padding", share, where, evidence, BOUND, case)

    def _garbage(self) -> Iterator[Finding]:
        share = self.data["garbage_s"] / self.total
        evidence = f"{share:.0%} of the time in Python's collector of cycles"
        asked = next((at for at in map(_at, self.seen["file"], self.seen["line"]) if "gc.collect" in at), None)
        case = "asked for" if asked else ""
        yield self._finding("garbage collection", share, asked or "wherever objects are made", evidence, case=case)

    def _backwards(self) -> Iterator[Finding]:
        """Several backward passes in an iteration: through one graph, or of micro-batches."""
        each, backward = self.data["backwards"] / len(self.iterations), self.activities[observe.BACKWARD]
        if backward and each >= 1.5 and self.data["retained"] >= 0.5 * len(self.iterations):
            evidence = f"{each:.3g} backward passes an iteration, and the graph is kept for the next"
            fault, repeated = "repeated backward", backward
        elif backward and each >= MICRO_BATCHES:
            evidence = f"{each:.3g} micro-batches an iteration"
            fault, repeated = "small batches", backward + self.activities[observe.COMPUTING]
        else:
            return
        yield self._finding(fault, repeated * (1 - 1 / each), self._dearest(observe.BACKWARD), evidence, BOUND)

    def _unclaimed(self) -> Iterator[Finding]:
        """Backward passes through what nothing trains."""
        if not self.data.get("unclaimed"):
            return
        name, count, numbers, passed = self.data["unclaimed"]
        evidence = f"{count} weights get gradients, {numbers:.0%} of all numbers that do, and no optimizer has them"
        share = numbers * self.activities[observe.BACKWARD] * (0.5 if passed else 1)  # what passes on remains
        yield self._finding("gradients without an optimizer", share, f"weights of {name}", evidence, BOUND)

    def warnings(self) -> list[Note]:
        grown = growth(self.data["memory"], self.data["device_bytes"])
        warnings = [Note("growing memory", grown)] if grown else []
        if (others := self.data.get("others") or 0.0) >= BUSY:
            text = f"other processes took {others:.1f} cores: operators of several threads wait for each other then"
            warnings.append(Note("busy machine", f"{text}, and all shares may be wrong; profile again alone"))
        if self.data["anomaly"]:
            text = "anomaly detection is on, which notes a traceback for each operation and checks each gradient"
            warnings.append(Note("anomaly detection", f"{text}: {remedy('anomaly detection')}"))
        return warnings

    def notes(self) -> list[Note]:
        if not self.enough or self.data["epochs"] or self.data["evaluations"]:
            return []
        text = "no epoch ended while the loop was observed, so what follows one isn't in these shares"
        return [Note("epoch", f"{text}; --until-epoch waits for it")]


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
            return f"{text}: {remedy('growing memory')}"
    return ""


def late_rank(ranks: dict[int, dict[str, Any]]) -> list[Note]:
    """The rank whose own work, outside of backward and collectives, takes longest: the others wait for it."""
    if len(ranks) < 2:
        return []
    loops = {rank: Observed(data) for rank, data in ranks.items()}
    own = {}
    for rank, loop in loops.items():
        share = 1 - loop.activities[observe.BACKWARD] - loop.activities[observe.COMMUNICATING]
        own[rank] = share * loop.total / len(loop.iterations) * 1e3
    last = max(own, key=own.__getitem__)
    others = statistics.median(ms for rank, ms in own.items() if rank != last)
    if own[last] - others < 0.1 * loops[last].step_ms:
        return []
    where = "".join(f", most at {line.where}" for line in loops[last].lines(1))
    text = f"rank {last} is late: {milliseconds(own[last])} an iteration of its own work{where}"
    return [Note("late rank", f"{text}; the others' take {milliseconds(others)} and wait for it")]


def _by_line(seen: pd.DataFrame) -> pd.Series:
    """Shares by file and line, the largest first."""
    return seen.groupby(["file", "line"])["share"].sum().sort_values(ascending=False, kind="stable")


def place(file: str, line: int) -> str:
    return f"{Path(file).name}:{line}"


def source(file: str, line: int) -> str:
    return " ".join(linecache.getline(file, line).split())


def _at(file: str, line: int) -> str:
    return "  ".join(filter(None, [place(file, line), source(file, line)]))
