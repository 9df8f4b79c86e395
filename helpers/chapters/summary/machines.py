"""Whose records there are, and what has none."""

from collections.abc import Mapping

import pandas as pd

from ...lab.machine import slug

# Columns that name a row's variant, the first that a table has
NAMES = ("variant", "step", "rung", "backend", "strategy", "reader", "decoder", "format", "way", "fix", "case", "loop")


def described(known: pd.DataFrame, *folders: str) -> str:
    """The machines of these folders that have records, each with its torch and the dates of its rows."""
    texts = []
    for row in known.to_dict("records"):
        if slug(row["gpu"]) in folders:
            dates = " to ".join(dict.fromkeys((row["first_date"], row["last_date"])))
            texts.append((folders.index(slug(row["gpu"])), f"{row['gpu']} (torch {row['torch']}, {dates})"))
    return "; ".join(text for _, text in sorted(texts))


def not_measured(tables: Mapping[str, pd.DataFrame]) -> pd.DataFrame:
    """The rows without figures, by table and reason; tables of which there are none at all in one line."""
    never = ", ".join(name for name, rows in tables.items() if not len(rows))
    lines = [{"table": never, "rows": "all", "reason": "never measured here"}] if never else []
    for name, rows in tables.items():
        if not len(rows):
            continue
        absent = rows[rows["status"] != "ok"]
        column = next((column for column in NAMES if column in absent and absent[column].notna().any()), None)
        for reason, group in absent.groupby(absent["status"].str.replace(r": \d.*", "", regex=True), sort=False):
            named = ", ".join(dict.fromkeys(group[column].dropna().astype(str))) if column else f"{len(group)}"
            lines.append({"table": name, "rows": named, "reason": reason})
    return pd.DataFrame(lines, columns=["table", "rows", "reason"])
