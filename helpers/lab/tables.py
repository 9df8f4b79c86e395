"""What the chapters share in telling of records: groups of rows, numbers, and whether a goal is reached."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import pandas as pd

YES_NO = {"True": "yes", "False": "no"}


def groups(frame: pd.DataFrame, names: list[str]) -> Iterator[tuple[dict[str, Any], pd.DataFrame]]:
    """Groups in the order of the rows, with their keys by name; none of an empty frame."""
    if len(frame):
        for values, found in frame.groupby(names, sort=False):
            yield dict(zip(names, values, strict=True)), found


def reached(yes: bool) -> str:
    return "reached" if yes else "missed"


def number(value: object, whole: bool = False) -> str:
    """Three significant digits (or a whole number), yes or no, a dash for nothing."""
    if value is None or value == "" or (isinstance(value, float) and value != value):
        return "–"
    if said := YES_NO.get(str(value)):  # of a bool, and of one that was read from a record
        return said
    if not isinstance(value, (int, float, np.integer, np.floating)):
        return str(value)
    if whole or isinstance(value, (int, np.integer)):
        return f"{int(value):d}" if abs(value) < 10_000 else f"{int(value):,d}"
    return f"{value:,.0f}" if abs(value) >= 999.5 else f"{value:#.3g}".rstrip(".")
