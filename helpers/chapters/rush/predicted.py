"""The ladder beside what `fit` counts and predicts of its rungs: memory and speed."""

import contextlib
from types import SimpleNamespace

import pandas as pd

from ... import fit
from ...book.table import numbers_of
from ...book.values import PERCENT, Number, derived, lacking
from ...lab import cards
from ...lab.memory import GIB
from ...rush import Setup, climb
from ...rush.setup import CHANGES, LADDERS, stands_on
from .ladder import MIXED, ladder

TOLD = {  # what is predicted of a rung: its unit, and the heads of its measured value, the prediction and the error
    "tokens_per_s": ("", ("tokens/s", "predicted", "off by")),
    "mfu": (PERCENT, ("MFU", "predicted MFU", "MFU off by")),
    "peak_gib": ("", ("peak, GiB", "counted, GiB", "count off by")),
}


def _in_table(gpu: str) -> bool:
    with contextlib.suppress(ValueError):
        return bool(cards.card(gpu))
    return False


@numbers_of([ladder])
def predicted(rows: pd.DataFrame) -> SimpleNamespace:
    """What `fit` predicts of a GPU's rungs beside what was measured, from a count of each rung's own step.

    It takes some five seconds a rung. Of a card that isn't in its table it says nothing.
    """
    counts: dict[str, dict[str, int]] = {}
    lines, setups = [], climb(Setup(model=rows["model"].iloc[0], sequence=int(rows["sequence"].iloc[0])))
    alike = rows["step"].map(LADDERS["cuda"][1]) != CHANGES  # what trains to another loss has no rate to predict
    for row in rows[alike & (rows["preset"] != "cpu") & rows["gpu"].map(_in_table)].to_dict("records"):
        try:
            peak = fit.count(setups[row["step"]])
        except ValueError:  # what only a library that isn't here could run
            continue
        counts[row["step"]] = peak.parts
        time = fit.step_time(setups[row["step"]], cards.card(row["gpu"]))
        told = {"tokens_per_s": time["tokens_per_s"], "mfu": time["mfu"], "peak_gib": peak.bytes / GIB}
        line = {"rung": row["step"], "in the band": time["low"] <= row["tokens_per_s"] <= time["high"]}
        for name, (unit, heads) in TOLD.items():
            off = Number(told[name] / row[name] - 1, PERCENT, decimals=0)
            line |= dict(zip(heads, (Number(row[name], unit), Number(told[name], unit), off), strict=True))
        lines.append(line)

    def error(name: str) -> Number:
        head = TOLD[name][1][-1]
        median = pd.Series([abs(float(line[head])) for line in lines]).median()
        return Number(median, PERCENT, missing="a GPU's ladder")

    return SimpleNamespace(
        table=pd.DataFrame(lines),
        speed_error=error("tokens_per_s"),
        memory_error=error("peak_gib"),
        in_16_bits=SimpleNamespace(copies=_more(counts, "weight copies"), activations=_more(counts, "activations")),
    )


def _more(counts: dict[str, dict[str, int]], part: str) -> Number:
    """GiB that mixed precision holds more of a part than the rung below it, as counted."""
    rungs = MIXED, stands_on(MIXED)
    if not all(rung in counts for rung in rungs):
        return lacking("the rungs below and in mixed precision", "GiB")
    after, before = (counts[rung][part] for rung in rungs)
    return derived((after - before) / GIB, "counted by fit", "GiB", 1)
