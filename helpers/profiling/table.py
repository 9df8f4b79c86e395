"""A profile as a table: one row a module, and what the step took in all."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pandas as pd

from ..lab.memory import MIB
from .spans import BACKWARD, FORWARD, KINDS, Step, Tally, rises, tally

NAN = float("nan")
MEMORY = ("activation_mib", "peak_mib", "backward_peak_mib")


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
        return {column: [NAN] * (modules + 2) for column in MEMORY}
    columns = {"activation_mib": [*weighed.kept.module_bytes, NAN, weighed.kept.total_bytes]}
    levels, peaks = np.array(weighed.levels, float).T
    risen = rises(weighed.spans, levels, peaks, modules)
    columns["peak_mib"] = [*risen[FORWARD], NAN, peaks[1:].max() - levels[0]]
    columns["backward_peak_mib"] = [*risen[BACKWARD], NAN, NAN]
    return {column: (np.array(values) / MIB).tolist() for column, values in columns.items()}
