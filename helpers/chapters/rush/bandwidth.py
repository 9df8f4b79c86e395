"""Times of kernels beside a copy's: rows of variants that took turns, and their table."""

import pandas as pd

from ...book.values import timed
from ...lab import STATUS, Comparison, Row
from ...lab.ceilings import copy, large_copy

TIMES = "variant median_ms p20_ms p80_ms n "


def kernel_rows(missing: dict[str, str], timed: Comparison, moved: int) -> list[Row]:
    """A row for each variant: its time, and its bandwidth in moving `moved` bytes as a share of a copy's; or why it
    can't run here."""
    gb_per_s = copy(large_copy(on_cpu=512))[1]
    rows = []
    for variant, reason in missing.items():
        if reason:
            status = reason if reason.startswith("not installed") else f"not here: {reason}"
            rows.append({"variant": variant, STATUS: status})
            continue
        timing = timed.timing(variant)
        share = moved / timing.median_ms / 1e6 / gb_per_s
        rows.append({"variant": variant} | timing.row() | {"share_of_copy": share})
    return rows


def bandwidth(rows: pd.DataFrame, sizes: list[str]) -> pd.DataFrame:
    names = [*sizes, "variant", "median_ms", "p20_ms", "p80_ms", "share_of_copy"]
    return timed(rows, names).rename(columns={"share_of_copy": "share of copy bandwidth"})
