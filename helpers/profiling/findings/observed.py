"""Findings from the observation of the unprofiled loop (`observe`): shares of its wall time, by line and activity."""

import itertools
import statistics
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import pandas as pd

from ...faults import remedy
from ...watching import pace, settings, stacks
from ...watching.stacks import place, quoted, source
from ..diagnosis import BOUND, ESTIMATE, MEASURED, Finding, Line, milliseconds
from ..trace import Note
from .clock import own_clock

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
PAGE, FAULT_S = 4096, 1e-6  # bytes of a page, and what the kernel takes to clear and map one
ENDS_S = 3600.0  # memory that is full so soon ends the training
LONG_S = 20.0  # seconds in which a single iteration shows enough
MOST_BREAKS = 3  # of a graph, that are named
ANEW = 0.5  # of iterations in which a loader begins anew
COSTLY, OF_MODELS = "costly line", ("<module>", "forward")  # whose lines are many things' and count one by one
LEAST_SLOWER = 0.03  # growth of an iteration's time over all that was watched
TELLS_GROWTH = 0.5  # an exclusion of less than this says little
MOST_GROWN, THROTTLED = 3, 0.95  # kinds of things that are named; a GPU's clock beside the one at first
# Findings whose cause is another one's, where that brings half as much
EXPLAINED = {
    "small operators": {"Python loop", "small batches"},
    "waiting for the loader": {"new loader each batch"},
    "unfused optimizer": {"dense embedding gradients"},
}
_ACTIVITIES = {
    stacks.EVALUATING: "evaluation",
    stacks.SAVING: "checkpoints",
    stacks.DRAWING: "drawing",
    stacks.LOGGING: "logging",
    stacks.RECOMPUTING: "recomputed activations",
    stacks.COMPILING: "compiling",
}


class Observed:
    """What `Observer.data` saw, as findings and notes. Nothing of fewer than `LEAST_ITERATIONS` iterations.

    `gone_back` tells how a recorded backward pass is shared among functions, by file and name.
    """

    def __init__(self, data: dict[str, Any], gone_back: Mapping[tuple[str, str], float] | None = None) -> None:
        self.data, self.gone_back = data, gone_back or {}
        self.iterations: list[float] = data["iterations"]
        self.total = max(data["seconds"], 1e-9)
        self.enough = len(self.iterations) >= (LEAST_ITERATIONS if self.total < LONG_S else 1)
        self.step_ms = statistics.fmean(self.iterations) * 1e3 if self.iterations else 0.0
        self.seen = pd.DataFrame(data["lines"], columns=["file", "line", "function", "activity", "seconds", "calls"])
        self.seen["share"] = self.seen["seconds"].astype(float) / self.total
        self.activities = defaultdict(float, self.seen.groupby("activity")["share"].sum())

    @property
    def outside(self) -> float:
        """The share of the wall time that no recorded window holds: windows are of single iterations."""
        return sum(self.activities[name] for name in (stacks.EVALUATING, stacks.SAVING, stacks.DRAWING))

    @property
    def updating(self) -> float:
        """The share of optimizers' steps, the user's own among them."""
        own = (self.seen["activity"] == stacks.COMPUTING) & (self.seen["function"] == "step")
        return self.activities[stacks.OPTIMIZER] + self.seen.loc[own, "share"].sum()

    def lines(self, most: int = 3) -> list[Line]:
        """The user's dearest lines."""
        by_line = self.seen.groupby(["file", "line"]).agg({"activity": "first", "share": "sum"})  # first: its dearest
        return [
            Line(place(*at), source(*at), line["activity"], line["share"])
            for at, line in by_line.nlargest(most, "share").iterrows()
        ]

    def costly_line(self, products: Mapping[str, float], findings: list[Finding]) -> Iterator[Finding]:
        """The line that computes longest of those that hardly multiply matrices, by the products in each.

        What is no model's `forward` counts with all of its lines, unless it is mostly gone back through: that is part
        of a model. None where a finding explains half of the time: one that names the line, or small operators, of
        which `products` knows the lines.
        """
        lines = self.seen[self.seen["activity"] == stacks.COMPUTING] if self.enough else self.seen[:0]
        share_of = [products.get(place(row.file, row.line), 0.0) for row in lines.itertuples()]
        lines = lines.loc[[share < MULTIPLIES for share in share_of]]
        whole = lines["function"].where(~lines["function"].isin(OF_MODELS), lines["line"])
        groups = [group for _, group in lines.groupby(["file", whole]) if not self._of_model(group)]
        for group in sorted(groups, key=lambda group: -group["share"].sum())[:1]:
            dearest, share = _by_line(group).index[0], group["share"].sum()
            called = any(place(row.file, row.line) in products for row in group.itertuples())
            explained = (
                f.gain_share
                for f in findings
                if f"{place(*dearest)} " in f"{f.where} " or (called and f.finding == "small operators")
            )
            if share >= DEAR and max(explained, default=0.0) < share / 2:
                evidence = (
                    f"{share:.0%} of the time in {group['function'].iloc[0]}, hardly any of it in matrix products"
                )
                yield self._finding(COSTLY, share, quoted(*dearest), evidence, BOUND)

    def _of_model(self, lines: pd.DataFrame) -> bool:
        """Whether a function's lines are mostly gone back through."""
        file, function = lines["file"].iloc[0], lines["function"].iloc[0]
        return function not in OF_MODELS and self._gone_back(file, function) >= lines["share"].sum() / 2

    def _gone_back(self, file: str, function: str) -> float:
        """The share of the time that goes back through a function."""
        back = sum(part for (path, of), part in self.gone_back.items() if of == function and file.endswith(path))
        return back * self.activities[stacks.BACKWARD]

    def text(self) -> list[str]:
        """What was seen, in lines, where there is no profile to go with it."""
        if not self.iterations:
            return []
        median = milliseconds(statistics.median(self.iterations) * 1e3)
        lines = [f"{len(self.iterations)} iterations were seen, median {median}"]
        lines += [f"  {line.share:4.0%}  {line.where}  {line.source}  ({line.activity})" for line in self.lines()]
        return lines + [f"{f.finding}: {f.gain}; {f.where}; {f.advice}" for f in ranked(self.findings(0.01))]

    def findings(self, least: float) -> list[Finding]:
        if not self.enough:
            return []
        rules = [self._doing, self._loader, self._loops, self._padding, self._garbage, self._backwards, self._unclaimed]
        rules += [self._memory, self._anomaly, self._slower, self._averaging]
        return [finding for rule in rules for finding in rule() if finding.gain_share >= least or finding.urgent]

    def _finding(
        self, name: str, share: float, where: str, evidence: str, sure: str = MEASURED, case: str = ""
    ) -> Finding:
        return Finding(name, "observed", share * self.step_ms, share, where, evidence, remedy(name, case), sure)

    def _dearest(self, activity: str) -> str:
        """The dearest line of an activity."""
        return quoted(*_by_line(self.seen[self.seen["activity"] == activity]).index[0])

    def _doing(self) -> Iterator[Finding]:
        for activity, fault in _ACTIVITIES.items():
            if share := self.activities[activity]:
                evidence = f"{share:.0%} of the time of {len(self.iterations)} iterations"
                if activity == stacks.COMPILING and (again := self.data.get("compiled", {}).get("again")):
                    evidence += f"; compiled again because {again[-1]}"
                sure = BOUND if activity == stacks.EVALUATING and self.data["evaluations"] < 2 else MEASURED
                yield self._finding(fault, share, self._dearest(activity), evidence, sure)

    def _loader(self) -> Iterator[Finding]:
        waits, inside = self.activities[stacks.LOADING], self.activities[stacks.DATASET]
        if waits + inside < LEAST_PADDING:
            return
        evidence = f"{waits + inside:.0%} of the time until a batch is there"
        for file, line, often in self.data.get("loaders", []):
            if often >= ANEW:
                evidence = f"{often:.2g} times an iteration a loader begins anew; {evidence}"
                yield self._finding("new loader each batch", waits + inside, quoted(file, line), evidence, BOUND)
        workers = self.data.get("workers", [])
        if inside:
            where = self._dearest(stacks.DATASET)
            evidence += f", {inside:.0%} of it in the dataset's own lines, in the process that trains"
            case = "in the dataset"
        else:
            where, case = self._dearest(stacks.LOADING), "observed"
            if workers:
                file, line, seconds = workers[0]
                where = quoted(file, line)
                evidence += f"; that line has {seconds / sum(each for *_, each in workers):.0%} of the workers' time"
        yield self._finding("waiting for the loader", waits + inside, where, evidence, case=case)

    def _loops(self) -> Iterator[Finding]:
        """Functions of the user's that make many small calls: a loop that could be one call on a batch."""
        looping = self.seen[(self.seen["activity"] == stacks.COMPUTING) & (self.seen["calls"] >= LOOP_CALLS)]
        for (file, name), lines in looping.groupby(["file", "function"]):
            share = lines["share"].sum()
            if share < LOOP_SHARE:
                continue
            evidence = f"{lines['calls'].max():,} calls an iteration from {name}, {share:.0%} of the time"
            if (back := self._gone_back(file, name)) >= LEAST_BACKWARD:
                evidence += f", and {back:.0%} for their backward pass"
                share += back
            yield self._finding("Python loop", share, quoted(*_by_line(lines).index[0]), evidence, BOUND)

    def _padding(self) -> Iterator[Finding]:
        positions, padded, shared = self.data["padding"] or (1, 0, 0)
        if padded / positions < LEAST_PADDING:
            return
        share = padded / positions * (self.activities[stacks.COMPUTING] + self.activities[stacks.BACKWARD])
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
        asked = next((at for at in map(quoted, self.seen["file"], self.seen["line"]) if "gc.collect" in at), None)
        case = "asked for" if asked else ""
        yield self._finding("garbage collection", share, asked or "wherever objects are made", evidence, case=case)

    def _backwards(self) -> Iterator[Finding]:
        """Several backward passes in an iteration: through one graph, or of micro-batches."""
        each, backward = self.data["backwards"] / len(self.iterations), self.activities[stacks.BACKWARD]
        if backward and each >= 1.5 and self.data["retained"] >= 0.5 * len(self.iterations):
            evidence = f"{each:.3g} backward passes an iteration, and the graph is kept for the next"
            fault, repeated = "repeated backward", backward
        elif backward and each >= MICRO_BATCHES:
            evidence = f"{each:.3g} micro-batches an iteration"
            fault, repeated = "small batches", backward + self.activities[stacks.COMPUTING]
        else:
            return
        yield self._finding(fault, repeated * (1 - 1 / each), self._dearest(stacks.BACKWARD), evidence, BOUND)

    def _averaging(self) -> Iterator[Finding]:
        """Gradients that the ranks average more than once before a step."""
        each = self.data.get("averaged", 0) / len(self.iterations)
        if each >= 1.5 and self.activities[stacks.BACKWARD]:
            evidence = f"{each:.3g} times an iteration DistributedDataParallel averages all gradients over the ranks"
            share = (1 - 1 / each) * self.activities[stacks.BACKWARD]
            yield self._finding("gradients averaged too often", share, self._dearest(stacks.BACKWARD), evidence, BOUND)

    def _unclaimed(self) -> Iterator[Finding]:
        """Backward passes through what nothing trains."""
        if not self.data.get("unclaimed"):
            return
        name, count, numbers, passed = self.data["unclaimed"]
        evidence = f"{count} weights get gradients, {numbers:.0%} of all numbers that do, and no optimizer has them"
        share = numbers * self.activities[stacks.BACKWARD] * (0.5 if passed else 1)  # what passes on remains
        yield self._finding("gradients without an optimizer", share, f"weights of {name}", evidence, BOUND)

    def _memory(self) -> Iterator[Finding]:
        """Memory that a list of the script's keeps, which costs new pages, and ends the training when it is full.

        Within a loader's first pass nobody can know whether the list lives longer than that.
        """
        lasts = self.data["epochs"] or not (self.activities[stacks.LOADING] + self.activities[stacks.DATASET])
        grown, slope, left = growth(self.data["memory"], self.data["device_bytes"], self.data.get("available", 0))
        for file, line, count, graphs in self.data.get("growing", []) if grown else []:
            share = slope / PAGE * FAULT_S * 1e3 / self.step_ms
            evidence = f"{grown}; a list of {count:,} items gets more here in each iteration"
            finding = self._finding("growing memory", share, quoted(file, line), evidence, ESTIMATE, "graphs" * graphs)
            yield replace(finding, urgent=lasts and left * self.step_ms / 1e3 < ENDS_S)

    def _anomaly(self) -> Iterator[Finding]:
        """It notes a traceback for each operation, and looks for NaN in each gradient."""
        if self.data["anomaly"]:
            share = self.activities[stacks.NOTING] + self.activities[stacks.BACKWARD]
            evidence = f"{self.activities[stacks.NOTING]:.0%} of the time notes tracebacks; each gradient is checked"
            where = self.data["settings"].get(settings.ANOMALY, "")
            yield self._finding("anomaly detection", share, where, evidence, BOUND)

    def _slower(self) -> Iterator[Finding]:
        """Iterations that take longer and longer, with the line that does and what there is more and more of."""
        watched = self.data.get("pace") or {"blocks": [], "looks": []}
        found, looks = pace.trend(watched["blocks"]), watched["looks"]
        if not found or found.low * found.minutes < LEAST_SLOWER:
            return
        times = f"{milliseconds(found.first_ms)} at first and {milliseconds(found.last_ms)} {found.minutes:.3g} minutes"
        evidence = f"a step took {times} later; {found.growth:.0%} ({found.low:.0%} to {found.high:.0%}) more a minute"
        more = pace.grown(looks)
        if more:
            evidence += f"; an iteration adds {', '.join(f'{each:.2g} {name}' for name, each in more[:MOST_GROWN])}"
        clocks = [look["counted"][pace.CLOCK] for look in looks if pace.CLOCK in look["counted"]]
        if falls := bool(clocks) and clocks[-1] < THROTTLED * clocks[0]:
            hot = looks[-1]["counted"].get(pace.CELSIUS, 0)
            evidence += f"; the GPU's clock fell from {clocks[0]:,.0f} to {clocks[-1]:,.0f} MHz at {hot:.0f} °C"
        line = pace.later_line(looks)
        its_own = line is not None and line[1] * 1e3 > (found.last_ms - found.first_ms) / 4  # half, between the halves
        case = "" if more else "hot" if falls else "line" if its_own else "else"
        where = quoted(*line[0]) if line else "all lines alike"
        share = 1 - found.first_ms / found.last_ms
        yield self._finding("slower and slower", share, where, evidence, case=case)

    def warnings(self) -> list[Note]:
        grown, _, _ = growth(self.data["memory"], self.data["device_bytes"], self.data.get("available", 0))
        kept = next(self._memory(), None)
        text = f"{grown} ({kept.where})" if kept else grown
        warnings = [Note("growing memory", text)] if grown and not (kept and kept.urgent) else []
        if (others := self.data.get("others") or 0.0) >= BUSY:
            text = f"other processes took {others:.1f} cores: operators of several threads wait for each other then"
            warnings.append(Note("busy machine", f"{text}, and all shares may be wrong; profile again alone"))
        compiled = self.data.get("compiled", {})
        if breaks := compiled.get("breaks"):
            at = "; ".join(f"{quoted(file, line)} ({why})" for file, line, why in breaks[:MOST_BREAKS])
            more = f"; and {len(breaks) - MOST_BREAKS} more" if len(breaks) > MOST_BREAKS else ""
            text = f"torch.compile returns to Python at {at}{more}: what is between is neither fused nor captured"
            warnings.append(Note("graph breaks", text))
        if where := self.data.get("settings", {}).get(name := settings.DETERMINISTIC):
            warnings.append(Note(name, f"{name} are on, which are slower for some operators ({where}): {remedy(name)}"))
        if self.data.get("searched"):
            text = (
                "find_unused_parameters=True searches the graph after each forward pass: leave it out if all are used"
            )
            warnings.append(Note("unused parameters", text))
        return warnings + [Note("environment", text) for text in self.data.get("variables", [])]

    def notes(self) -> list[Note]:
        if not self.enough:
            return []
        clock = list(own_clock(self.data, self.step_ms * (1 - self.activities[stacks.EVALUATING])))
        if compiled := self.data.get("compiled"):
            again = f", of them {len(compiled['again'])} again for other shapes or values" if compiled["again"] else ""
            text = f"torch.compile took {compiled['seconds']:.1f} s for {compiled['graphs']} graphs{again}"
            clock.append(Note("compilation", text))
        if (found := pace.trend(self.data.get("pace", {}).get("blocks", []))) and not any(self._slower()):
            text = f"steps got no slower in {found.minutes:.3g} minutes: a growth above {found.most:.1%} is excluded"
            if found.most > TELLS_GROWTH:
                text = (
                    f"whether steps got slower isn't known: in {found.minutes:.3g} minutes their times varied too much"
                )
            clock.append(Note("pace", text))
        if self.data["epochs"] or self.data["evaluations"]:
            return clock
        text = "no epoch ended while the loop was observed, so what follows one isn't in these shares"
        return [*clock, Note("epoch", f"{text}; --until-epoch waits for it")]


def ranked(findings: list[Finding]) -> list[Finding]:
    """In order: what ends the training, then by gain; without what another one explains."""
    gains = {finding.finding: finding.gain_share for finding in findings}
    causes = {f.finding: [gains.get(cause, 0.0) for cause in EXPLAINED.get(f.finding, ())] for f in findings}
    left = [f for f in findings if max(causes[f.finding], default=0.0) < f.gain_share / 2 or not f.gain_share]
    return sorted(left, key=lambda finding: (not finding.urgent, -finding.gain_share))


def growth(memory: list[list[int]], device_bytes: int, available: int = 0) -> tuple[str, float, float]:
    """The memory that every iteration adds, of the second half of what was observed: in words, bytes, iterations left.

    ("", 0, 0) if it stays.
    """
    later = memory[len(memory) // 2 :]
    if len(later) < 4:
        return "", 0.0, 0.0
    for column, name in ((2, "the device"), (1, "the process")):
        counts, sizes = [row[0] for row in later], [row[column] for row in later]
        slope, _ = statistics.linear_regression(counts, sizes)
        rising = sum(after > before for before, after in itertools.pairwise(sizes))
        if sizes[-1] - sizes[0] > GROWS and rising >= 0.7 * (len(sizes) - 1):
            free = max(device_bytes - sizes[-1], 0) if column == 2 else available
            text = f"memory of {name} grows by {slope / 2**20:.1f} MiB an iteration"
            return f"{text}, and is full after {free / slope:,.0f} more" if free else text, slope, free / slope
    return "", 0.0, 0.0


def late_rank(ranks: dict[int, dict[str, Any]]) -> list[Finding]:
    """The rank whose own work, outside of backward and collectives, takes longest: the others wait for it."""
    loops = {rank: Observed(data) for rank, data in ranks.items() if data["iterations"]}
    if len(loops) < 2:
        return []
    together = (stacks.BACKWARD, stacks.COMMUNICATING)
    own = {rank: (1 - sum(loop.activities[name] for name in together)) * loop.step_ms for rank, loop in loops.items()}
    last = max(own, key=own.__getitem__)
    loop, others = loops[last], statistics.median(ms for rank, ms in own.items() if rank != last)
    share = (own[last] - others) / loop.step_ms
    if share < 0.1:
        return []
    where = quoted(*_by_line(loop.seen[~loop.seen["activity"].isin(together)]).index[0])
    evidence = f"rank {last} is late: {milliseconds(own[last])} an iteration of its own work"
    evidence += f"; the others' take {milliseconds(others)} and wait for it"
    return [loop._finding("late rank", share, where, evidence)]


def _by_line(seen: pd.DataFrame) -> pd.Series:
    """Shares by file and line, the largest first."""
    return seen.groupby(["file", "line"])["share"].sum().sort_values(ascending=False, kind="stable")
