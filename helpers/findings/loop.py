"""The observed loop as shares of its wall time, by line and activity."""

import statistics
from collections import defaultdict
from collections.abc import Mapping

import pandas as pd

from ..faults import remedy
from ..script import stacks
from ..script.observation import LineTime, Observation
from ..script.stacks import place, quoted, source
from .summary import MEASURED, Finding, Line

LEAST_ITERATIONS = 5
LONG_S = 20.0  # seconds in which a single iteration shows enough


class Loop:
    """What was observed of a loop, which proves nothing where it is less than `LEAST_ITERATIONS` iterations.

    `backward` tells how a recorded backward pass is shared among functions, by file and name.
    """

    def __init__(self, observation: Observation, backward: Mapping[tuple[str, str], float] | None = None) -> None:
        self.observation, self.backward = observation, backward or {}
        self.iterations = observation.iterations
        self.total = max(observation.seconds, 1e-9)
        self.enough = len(self.iterations) >= (LEAST_ITERATIONS if self.total < LONG_S else 1)
        self.step_ms = statistics.fmean(self.iterations) * 1e3 if self.iterations else 0.0
        self.table = pd.DataFrame(observation.lines, columns=list(LineTime._fields))
        self.table["share"] = self.table["seconds"].astype(float) / self.total
        self.activities = defaultdict(float, self.table.groupby("activity")["share"].sum())

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

    def finding(
        self, name: str, share: float, where: str, evidence: str, sure: str = MEASURED, case: str = ""
    ) -> Finding:
        return Finding(name, "observed", share * self.step_ms, share, where, evidence, remedy(name, case), sure)

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
