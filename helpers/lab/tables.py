"""Formatting of records, shared by the chapters: groups of rows, numbers, and whether a goal is reached."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import pandas as pd

YES_NO = {"True": "yes", "False": "no"}


def groups(frame: pd.DataFrame, names: list[str]) -> Iterator[tuple[dict[str, Any], pd.DataFrame]]:
    """Groups in order of appearance, each with its keys by name; none for an empty frame."""
    if len(frame):
        for values, group in frame.groupby(names, sort=False):
            yield dict(zip(names, values, strict=True)), group


def reached(yes: bool) -> str:
    return "reached" if yes else "missed"


def number(value: object, whole: bool = False) -> str:
    """Three significant digits (or an integer), yes or no for a bool, a dash for an empty cell."""
    if value is None or value == "" or (isinstance(value, float) and value != value):
        return "–"
    if answer := YES_NO.get(str(value)):  # a bool, or its text in a record
        return answer
    if not isinstance(value, (int, float, np.integer, np.floating)):
        return str(value)
    if whole or isinstance(value, (int, np.integer)):
        return f"{int(value):d}" if abs(value) < 10_000 else f"{int(value):,d}"
    return f"{value:,.0f}" if abs(value) >= 999.5 else f"{value:#.3g}".rstrip(".")
