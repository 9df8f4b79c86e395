"""Whose records there are, and what has none."""

import pandas as pd

from ...book.table import recorded
from ...lab.machine import slug
from .. import select


def described(known: pd.DataFrame, *folders: str) -> str:
    """The machines of these folders that have records, each with its torch and the dates of its rows."""
    texts = []
    for row in known.to_dict("records"):
        if slug(row["gpu"]) in folders:
            dates = " to ".join(dict.fromkeys((row["first_date"], row["last_date"])))
            texts.append((folders.index(slug(row["gpu"])), f"{row['gpu']} (torch {row['torch']}, {dates})"))
    return "; ".join(text for _, text in sorted(texts))


def not_measured(gpu: str, cpu: str) -> pd.DataFrame:
    """The tables that a GPU or a CPU should have and has no rows of, with the question that each answers."""
    lines = [
        {"table": table.name, "on": kind, "question": table.worth.answers}
        for table in select([])
        for kind, machine, preset in (("GPU", gpu, "big-gpu"), ("CPU", cpu, "cpu"))
        if table.configurations(preset) and not len(recorded(table, machine).rows)
    ]
    return pd.DataFrame(lines, columns=["table", "on", "question"])
