"""The observed loop as shares of its wall time: by kind of iteration, by line and by activity."""

import itertools
import statistics
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import pandas as pd

from ..faults import remedy
from ..script import stacks
from ..script.iterations import NO_CORE
from ..script.observation import LineTime, Observation
from ..script.stacks import place, quoted, source
from .summary import MEASURED, Finding, Kind, Line, milliseconds

LEAST_ITERATIONS = 5
LONG_S = 20.0  # seconds in which a single iteration shows enough
GROWS = 16 * 2**20  # bytes that a process may grow by


class Loop:
    """What was observed of a loop, which proves nothing where it is less than `LEAST_ITERATIONS` iterations.

    `backward` tells how a recorded backward pass is shared among functions, by file and name, and `forming` how many
    weights of a step are formed in a line, "train.py:7", or a function, "train.py in weight".
    """

    def __init__(
        self,
        observation: Observation,
        backward: Mapping[tuple[str, str], float] | None = None,
        forming: Mapping[str, float] | None = None,
    ) -> None:
        self.observation, self.backward, self.forming = observation, backward or {}, forming or {}
        self.iterations = observation.iterations
        self.count = observation.count or len(self.iterations)
        self.total = max(observation.seconds, 1e-9)
        self.enough = len(self.iterations) >= (LEAST_ITERATIONS if self.total < LONG_S else 1)
        ours = 1 - self.others_s / self._passed_s if self._passed_s else 1.0
        self.step_ms = ours * sum(self.iterations) / max(len(self.iterations), 1) * 1e3
        self.table = pd.DataFrame(observation.lines, columns=list(LineTime._fields))
        self.table["share"] = self.table["seconds"].astype(float) / self.total
        self.activities = defaultdict(float, self.table.groupby("activity")["share"].sum())

    @cached_property
    def strangers(self) -> float:
        """Of the cores that this training didn't get, the share that other programs than its own had."""
        cores = self.observation.cores
        own = sum(cores.get("workers", [])) + cores.get("children", 0.0)
        return cores["others"] / max(cores["others"] + own, 1e-9) if cores else 1.0

    @property
    def _passed_s(self) -> float:
        return float(self.observation.wall.get("seconds", 0.0))

    @cached_property
    def others_s(self) -> float:
        """Seconds without a core, as other programs had it."""
        rows = self.observation.wall.get("kinds", [])
        return self.strangers * sum(row["seconds"] for row in rows if row["kind"] == NO_CORE)

    @property
    def wall_s(self) -> float:
        """The time from the first iteration to the stop that is this training's own."""
        return self._passed_s - self.others_s

    @cached_property
    def kinds(self) -> list[Kind]:
        """Shares of the wall time, which add up to 1."""
        rows = self.observation.wall.get("kinds", [])
        return [self._kind(row, self.wall_s) for row in rows if self.wall_s > 0]

    def _kind(self, row: Mapping[str, Any], whole: float) -> Kind:
        share = row["seconds"] / whole * (1 - self.strangers if row["kind"] == NO_CORE else 1.0)
        spent: dict[str, float] = defaultdict(float)
        total = sum(seconds for *_, seconds in row.get("spent", []))
        for activity, _, _, seconds in row.get("spent", []):
            spent[activity] += share * seconds / total
        where = (*row["line"],) if row.get("line") else None
        collected = min(row.get("collected_s", 0.0) / whole, share)
        return Kind(row["kind"], share, row["count"], row["took_s"] * 1e3, dict(spent), where, collected)

    @property
    def ordinary(self) -> float:
        """The share of the wall time that ordinary steps take, an iteration each."""
        return self.kinds[0].share if self.kinds else 1.0

    def often(self, kind: Kind) -> str:
        """ "1 iteration in 40 takes 1,800 ms, others 16 ms"."""
        ordinary = self.kinds[0]
        every = ordinary.count / max(kind.count, 1)
        return f"1 iteration in {every:.3g} takes {milliseconds(kind.took_ms)}, others {milliseconds(ordinary.took_ms)}"

    def mostly(self, kinds: Mapping[str, float], share: float) -> str:
        """How often what takes a share comes, where half of it is in iterations of a kind; else ""."""
        return "".join(f"; {self.often(kind)}" for kind in self.kinds[1:] if kinds.get(kind.name, 0.0) > share / 2)

    @cached_property
    def forms(self) -> pd.DataFrame:
        """The lines that form weights, in the forward pass and where that is repeated."""
        lines = self.table[self.table["activity"].isin((stacks.COMPUTING, stacks.RECOMPUTING))]
        return lines.loc[[bool(self.formed(row)) for row in lines.itertuples()]]

    def formed(self, row: Any) -> float:
        """How many weights of a step a line of the table forms."""
        function = f"{Path(row.file).name} in {row.function}"
        return max(self.forming.get(name, 0.0) for name in (place(row.file, row.line), function))

    @property
    def outside(self) -> float:
        """The share of the wall time that no recorded window holds: windows are of single iterations."""
        return sum(self.activities[name] for name in (stacks.EVALUATING, stacks.SAVING, stacks.DRAWING))

    @property
    def updating(self) -> float:
        """The share of optimizers' steps, the user's own among them."""
        own = (self.table["activity"] == stacks.COMPUTING) & (self.table["function"] == "step")
        return self.activities[stacks.OPTIMIZER] + self.table.loc[own, "share"].sum()

    def lines(self, most: int = 3) -> list[Line]:
        """The user's dearest lines."""
        dearest = self.table.groupby(["file", "line"]).agg({"activity": "first", "share": "sum"})  # first: its dearest
        return [
            Line(place(*at), source(*at), line["activity"], line["share"])
            for at, line in dearest.nlargest(most, "share").iterrows()
        ]

    def files(self) -> dict[str, str]:
        """The paths of the user's files by their names, of those that only one has."""
        seen = self.observation
        paths = {*self.table["file"], *(loop["file"] for loop in seen.loops), *(file for file, *_ in seen.workers)}
        names = Counter(Path(path).name for path in paths)
        return {Path(path).name: path for path in paths if names[Path(path).name] == 1}

    def finding(
        self,
        name: str,
        share: float,
        where: str,
        evidence: str,
        sure: str = MEASURED,
        case: str = "",
        kinds: Mapping[str, float] | None = None,
    ) -> Finding:
        """`kinds` are the shares of it that lie in iterations of a kind; the rest is in ordinary steps."""
        advice = remedy(name, case)
        return Finding(name, "observed", share * self.step_ms, share, where, evidence, advice, sure, kinds=kinds or {})

    def beyond(self, *activities: str) -> dict[str, float]:
        """The shares of the wall time that an activity takes in iterations that aren't ordinary, by kind."""
        shares = {kind.name: sum(kind.spent.get(name, 0.0) for name in activities) for kind in self.kinds[1:]}
        return {name: share for name, share in shares.items() if share}

    def dearest(self, activity: str) -> str:
        """The dearest line of an activity."""
        return quoted(*by_line(self.table[self.table["activity"] == activity]).index[0])

    def backward_share(self, file: str, function: str) -> float:
        """The share of the time that goes back through a function."""
        back = sum(part for (path, of), part in self.backward.items() if of == function and file.endswith(path))
        return back * self.activities[stacks.BACKWARD]


def by_line(table: pd.DataFrame) -> pd.Series:
    """Shares by file and line, the largest first."""
    return table.groupby(["file", "line"])["share"].sum().sort_values(ascending=False, kind="stable")


def growth(memory: Sequence[tuple[int, int, int]], device_bytes: int, available: int = 0) -> tuple[str, float, float]:
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
