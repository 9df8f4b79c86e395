"""The project's goals, each a claim about a named number of a table, judged by the records of each machine.

`goals.csv` has them: that a number of a table, `amp/quality`, is at least or at most something; a dot in its name leads
into a namespace.
"""

from pathlib import Path
from typing import Any

import pandas as pd

from ...book.values import FAILS, HOLDS, Verdict
from ...lab.estimate import UNDECIDED
from .. import select

MARKS = {HOLDS: "✓", FAILS: "✗", UNDECIDED: "?"}
CHAPTERS = ("summary", "amp", "batching", "profiling", "swiglu", "rush", "pipelines", "compilers")  # 0 to 7


def verdict(goal: Any, machine: str) -> Verdict:
    """Of a machine's records: holds, does not hold, undecided or not measured."""
    value = select([goal.table])[0].on(machine).number(goal.name)
    return value.at_most(goal.at_most) if pd.isna(goal.at_least) else value.at_least(goal.at_least)


def table(**machines: str) -> pd.DataFrame:
    """All goals; for each machine, by the name that its column gets, the value with the mark of its outcome."""
    rows = []
    for goal in pd.read_csv(Path(__file__).with_suffix(".csv")).itertuples():
        row = {"chapter": str(CHAPTERS.index(goal.table.partition("/")[0])), "measure": goal.measure}
        for name, machine in machines.items():
            judged = verdict(goal, machine)
            value = f"{judged.number:bare} {MARKS[judged.outcome]}" if judged.number.measured else ""
            row |= {"goal": judged.bound, name: value}
        rows.append(row)
    return pd.DataFrame(rows)
