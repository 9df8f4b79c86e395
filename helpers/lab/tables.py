"""What the chapters share in telling of records: groups of rows, and whether a goal is reached."""

from collections.abc import Iterator
from typing import Any

import pandas as pd


def groups(frame: pd.DataFrame, names: list[str]) -> Iterator[tuple[dict[str, Any], pd.DataFrame]]:
    """Groups in the order of the rows, with their keys by name; none of an empty frame."""
    if len(frame):
        for values, found in frame.groupby(names, sort=False):
            yield dict(zip(names, values, strict=True)), found


def reached(yes: bool) -> str:
    return "reached" if yes else "missed"
