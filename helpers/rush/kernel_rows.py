"""`kernel_rows`: from a comparison of ways that move the same bytes to the rows of a table."""

from collections.abc import Callable

from helpers.lab import Comparison, device
from helpers.lab.ceilings import copy
from helpers.lab.records import STATUS, Row


def kernel_rows(
    found: dict[str, str],
    timed: Comparison,
    against: tuple[str, str],
    moved: int,
    more: Callable[[str], Row] = lambda way: {},
) -> list[Row]:
    """A row for each way, or what stands in its way: its time, its ratio to another's, its share of a copy's rate."""
    (column, base), gb_per_s = against, _copy_rate()
    rows = []
    for way, reason in found.items():
        if reason:
            rows.append({"way": way, STATUS: reason if reason.startswith("not installed") else f"not here: {reason}"})
            continue
        timing = timed.timing(way)
        ratios = {column: timed.ratio(way, base)[0], "share_of_copy": moved / timing.median_ms / 1e6 / gb_per_s}
        rows.append({"way": way} | timing.row() | ratios | more(way))
    return rows


def _copy_rate() -> float:
    return copy(4096 if device().type == "cuda" else 64)[1]
