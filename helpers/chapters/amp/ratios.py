"""Ratios to a baseline, as columns of a row that has several, and as numbers."""

from dataclasses import replace

import pandas as pd

from ...book.values import TIMES, Number, derived, over, pick
from ...lab import Comparison, Row

TIMED = ["variant", "median_ms", "p20_ms", "p80_ms", "ratio_to_torch"]
COLUMNS = "median_ms p20_ms p80_ms n"


def ratio_to(baseline: str) -> str:
    """The columns of a ratio to a baseline."""
    return " ".join(f"ratio_to_{baseline}{end}" for end in ("", "_low?", "_high?", "_pairs?"))


def against(timed: Comparison, variant: str, to: str, name: str) -> Row:
    """A variant's ratio to a baseline with its interval, in columns that name the baseline."""
    row = timed.row(variant, to)
    return {f"ratio_to_{name}": row["ratio"]} | {f"ratio_to_{name}_{end}": row[end] for end in ("low", "high", "pairs")}


def ratio_of(row: pd.DataFrame, column: str) -> Number:
    """A ratio of the only row, with its interval where it was recorded."""
    ratio, low, high, pairs = (pick(row, column + end, TIMES) for end in ("", "_low", "_high", "_pairs"))
    return replace(ratio, low=low.value, high=high.value, n=int(pairs.value)) if low.measured else ratio


def inverse(ratio: Number) -> Number:
    if ratio.low is None:
        return over(derived(1, "one"), ratio)
    return Number(1 / ratio.value, TIMES, 1 / ratio.high, 1 / ratio.low, ratio.n)
