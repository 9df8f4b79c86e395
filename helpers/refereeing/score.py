"""Scores: of a case the logarithm of its speedup over that of the reference's speedup, -1 for another training."""

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

import numpy as np

from ..lab.machine import device_name

DRAWS = 2000
LEAST_LOG = 0.01  # the reference's speedup is never taken for less, which nobody could be measured by
WIDTH_95 = 2 * 1.96
HEAD = ("case", "speedup", "95 %", "reference", "score", "losses", "what breaks the rules")
STYLE = "body{font:16px system-ui;margin:2em}td,th{padding:.3em 1em;text-align:left;border-bottom:1px solid #ccc}"


def score(row: dict[str, Any], speedup: float | None = None, reference: float | None = None) -> float:
    """0 for nothing changed or nothing gained, 1 for the reference, more for a faster one, -1 at least."""
    if row["broken"]:
        return -1.0
    if not row["changed"]:
        return 0.0
    gained = math.log(speedup or row["speedup"])
    share = gained / max(math.log(reference or row["reference"]["speedup"]), LEAST_LOG)
    return max(min(share, 0.0) if row["note"] else share, -1.0)


def interval(rows: Sequence[dict[str, Any]]) -> tuple[float, float]:
    """Of the mean score, 95 %: cases are drawn anew, and each one's speedups by their own intervals."""
    random = np.random.default_rng(0)

    def drawn(row: dict[str, Any]) -> float:
        both = [row, row.get("reference", row)]
        spread = [math.log(each["high"] / each["low"]) / WIDTH_95 for each in both]
        logs = [math.log(each["speedup"]) for each in both]
        return score(row, *np.exp(random.normal(logs, spread)))

    means = [np.mean([drawn(rows[index]) for index in random.integers(0, len(rows), len(rows))]) for _ in range(DRAWS)]
    low, high = np.percentile(means, [2.5, 97.5])
    return float(low), float(high)


@dataclass
class Results:
    rows: Sequence[dict[str, Any]]

    @property
    def mean(self) -> float:
        return float(np.mean([score(row) for row in self.rows]))

    def cells(self) -> list[tuple[str, ...]]:
        """A line of the table for each case."""
        lines: list[tuple[str, ...]] = []
        for row in self.rows:
            reference = f"{row['reference']['speedup']:.2f}x" if "reference" in row else ""
            rules = "; ".join([*row["broken"], *filter(None, [row["note"]])])
            measured: tuple[str, ...] = (f"{row['speedup']:.2f}x", f"{row['low']:.2f}–{row['high']:.2f}")
            measured = measured if row["verdict"] else ("", "")
            lines.append((row["case"], *measured, reference, f"{score(row):.2f}", row["losses"], rules))
        return lines

    def total(self) -> str:
        low, high = interval(self.rows)
        broken = sum(bool(row["broken"]) for row in self.rows)
        cases = f"{len(self.rows)} case{'s' if len(self.rows) > 1 else ''}"
        return f"score {self.mean:.2f} ({low:.2f} to {high:.2f}) over {cases}, {broken} no longer the same training"

    def text(self) -> str:
        table = [HEAD, *self.cells()]
        widths = [max(map(len, column)) for column in zip(*table, strict=True)]
        lines = ["  ".join(map(str.ljust, line, widths)).rstrip() for line in table]
        return "\n".join([*lines, "", self.total()])

    def json(self) -> str:
        low, high = interval(self.rows)
        cases = [row | {"score": score(row)} for row in self.rows]
        about = {"machine": device_name(), "score": self.mean, "low": low, "high": high}
        return json.dumps(about | {"cases": cases}, indent=1)

    def page(self, title: str) -> str:
        head, *lines = ("".join(f"<td>{escape(cell)}</td>" for cell in line) for line in (HEAD, *self.cells()))
        table = "".join(f"<tr>{line}</tr>" for line in (head.replace("td>", "th>"), *lines))
        name = escape(title)
        return f"<!doctype html><meta charset=utf-8><title>{name}</title><style>{STYLE}</style>" + (
            f"<h1>{name}</h1><p>{self.total()}</p><table>{table}</table>"
        )
