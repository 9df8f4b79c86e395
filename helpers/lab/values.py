"""Numbers that a sentence may quote: with their interval, or with what they were derived from.

    total = paired(row)                              # from the columns ratio low high pairs of a trial
    f"{total}"                                       # 2.4× (2.3 to 2.5, 12 pairs)
    f"{over(pick(rows, 'median_ms', variant='eager'), pick(rows, 'median_ms', variant='fused'))}"    # 3.1× (unpaired)
    f"{derived(11 / 9, 'eleven products for nine')}"                                                 # 1.22×
    total.at_least(2).outcome                        # holds, does not hold, undecided or not measured

A number that the records lack is still a `Number`: it says what is missing wherever it would be quoted.
"""

import math
from dataclasses import dataclass, replace
from typing import Any, SupportsFloat

import numpy as np
import pandas as pd

TIMES, PERCENT = "×", "%"
NOT_MEASURED = "not measured"
YES_NO = {"True": "yes", "False": "no"}
HOLDS, FAILS, UNDECIDED = "holds", "does not hold", "undecided"
T95 = {2: 12.71, 3: 4.30, 4: 3.18, 5: 2.78, 6: 2.57, 8: 2.36, 10: 2.26}  # runs -> Student's t, two-sided
quoted: set[str] = set()  # the factors that were formatted here: `say` lets no other pass


@dataclass(frozen=True)
class Number:
    """A value with its unit; `low` and `high` bound it with 95 % confidence, over `n` pairs.

    `derivation` says from what arithmetic or count a value comes that isn't timed and so needs no interval. A number
    that wasn't measured has the value NaN, and `missing` says what the records lack. `decimals` are those it is shown
    with; None chooses them by its size.
    """

    value: float
    unit: str = ""
    low: float | None = None
    high: float | None = None
    n: int = 0
    derivation: str = ""
    missing: str = ""
    decimals: int | None = None

    @property
    def measured(self) -> bool:
        return not math.isnan(self.value)

    def __float__(self) -> float:
        return float(self.value)

    def __str__(self) -> str:
        return format(self)

    def __format__(self, form: str) -> str:
        """In full, with its interval; `brief` leaves the interval out; a number of decimals, `1`, goes with both."""
        words = form.split()
        decimals = next((int(word) for word in words if word.isdigit()), self.decimals)
        if not self.measured:
            return f"[{NOT_MEASURED}: {self.missing}]"
        text = self._text(self.value, decimals) + self._unit()
        if self.unit == TIMES:
            quoted.add(text)
        if self.low is None or self.high is None:
            return f"{text} (unpaired)" if self.unit == TIMES and not self.derivation else text
        if "brief" in words:
            return text
        pairs = f", {self.n} pairs" if self.n else ""
        return f"{text} ({self._text(self.low, decimals)} to {self._text(self.high, decimals)}{pairs})"

    def _unit(self) -> str:
        return self.unit if self.unit in (TIMES, PERCENT, "") else f" {self.unit}"

    def _text(self, value: float, decimals: int | None) -> str:
        scaled = 100 * value if self.unit == PERCENT else value
        if decimals is not None:
            return f"{scaled:,.{decimals}f}"
        if self.unit == TIMES:
            return f"{scaled:.2f}" if scaled < 2 else f"{scaled:.1f}"
        if self.unit == PERCENT:
            return f"{scaled:.1f}"
        return number(scaled)

    def at_most(self, limit: float) -> "Verdict":
        return Verdict(self, "at most", limit)

    def at_least(self, limit: float) -> "Verdict":
        return Verdict(self, "at least", limit)


@dataclass(frozen=True)
class Verdict:
    """A claim about a number: whether it is on the right side of a limit."""

    number: Number
    relation: str
    limit: float

    @property
    def outcome(self) -> str:
        """Holds, does not hold, undecided (the interval contains the limit), or not measured."""
        number = self.number
        if not number.measured:
            return NOT_MEASURED
        low = number.value if number.low is None else number.low
        high = number.value if number.high is None else number.high
        if self.relation == "at most":
            return HOLDS if high <= self.limit else FAILS if low > self.limit else UNDECIDED
        return HOLDS if low >= self.limit else FAILS if high < self.limit else UNDECIDED

    @property
    def bound(self) -> str:
        """The limit in the number's unit: `at most 1.02×`."""
        as_number = Number(self.limit, self.number.unit, derivation="limit", decimals=self.number.decimals)
        return f"{self.relation} {as_number}"


def pick(rows: pd.DataFrame, column: str, unit: str = "", decimals: int | None = None, **where: Any) -> Number:
    """One cell: of the only row whose other columns are as `where` says; not measured if there is no such row."""
    chosen = rows
    for name, wanted in where.items():
        chosen = chosen[chosen[name] == wanted]
    conditions = ", ".join(f"{name} {wanted}" for name, wanted in where.items())
    if len(chosen) > 1:
        raise ValueError(f"{len(chosen)} rows with {conditions or 'no condition'}: name one")
    if not len(chosen):
        rows[column]  # a wrong column raises, also where the row is missing
        return lacking(f"{column} of {conditions}", unit)
    row = chosen.iloc[0]
    if pd.isna(row[column]):
        return lacking(f"{column} of {conditions}", unit)
    return Number(float(row[column]), unit, decimals=decimals)


def paired(row: Any, unit: str = TIMES) -> Number:
    """The ratio of a trial, from a row with the columns ratio, low, high and pairs."""
    return Number(float(row["ratio"]), unit, float(row["low"]), float(row["high"]), int(row["pairs"]))


def speedup(row: Any, decimals: int | None = None) -> Number:
    """How many times as fast as its baseline a row's variant is; with the interval of a trial, if it has one."""
    if "low" in row and row["low"] == row["low"]:
        return Number(1 / row["ratio"], TIMES, 1 / row["high"], 1 / row["low"], int(row["pairs"]), decimals=decimals)
    return Number(row["baseline_ms"] / row["median_ms"], TIMES, decimals=decimals)


def over(value: Number, baseline: Number) -> Number:
    """Their ratio. Both were measured apart, so it has no interval; from two derived numbers it is derived."""
    if not (value.measured and baseline.measured):
        return lacking(value.missing or baseline.missing, TIMES)
    both = value.derivation and baseline.derivation
    return Number(
        value.value / baseline.value, TIMES, derivation=f"{value.derivation} / {baseline.derivation}" if both else ""
    )


def visible(gain: Number, drift: float = 0.1) -> bool:
    """Whether the interval leaves 1 out; without one, whether the ratio is further from 1 than `drift` of a machine."""
    if gain.low is None or gain.high is None:
        return gain.measured and abs(gain.value - 1) > drift
    return not gain.low <= 1 <= gain.high


def over_runs(values: pd.Series, baselines: pd.Series) -> Number:
    """The ratio of runs that differ in one thing, matched by index, such as the seed; with Student's 95 % interval.

    With one run, or with more than `T95` tells, there is no interval.
    """
    logs = np.log((values / baselines).dropna())
    if not len(logs):
        return lacking("runs of both", TIMES)
    centre, spread = float(logs.mean()), float(logs.std()) / math.sqrt(len(logs)) * T95.get(len(logs), math.nan)
    if math.isnan(spread):
        return Number(math.exp(centre), TIMES)
    return Number(math.exp(centre), TIMES, math.exp(centre - spread), math.exp(centre + spread), len(logs))


def derived(value: SupportsFloat, derivation: str, unit: str = TIMES, decimals: int | None = None) -> Number:
    """A number from arithmetic or a count, which has no interval: `derivation` says which."""
    return Number(float(value), unit, derivation=derivation, decimals=decimals)


def lacking(what: str, unit: str = "") -> Number:
    """A number that isn't measured."""
    return Number(float("nan"), unit, missing=what)


def in_unit(value: Number, unit: str, decimals: int | None = None) -> Number:
    return replace(value, unit=unit, decimals=decimals)


def number(value: Any, whole: bool = False) -> str:
    """Three significant digits (or an integer), yes or no for a bool, a dash for an empty cell.

    Thousands are separated from 10,000 on.
    """
    if isinstance(value, Number):
        return format(value, "brief").removesuffix(" (unpaired)") if value.measured else "–"
    if value is None or value == "" or (isinstance(value, float) and value != value):
        return "–"
    if answer := YES_NO.get(str(value)):  # a bool, or its text in a record
        return answer
    if not isinstance(value, int | float | np.integer | np.floating):
        return str(value)
    size = abs(float(value))
    if whole or isinstance(value, (int, np.integer)):
        return f"{int(value):d}" if size < 10_000 else f"{int(value):,d}"
    if size >= 999.5:
        return f"{value:.0f}" if size < 9999.5 else f"{value:,.0f}"
    return f"{value:#.3g}".rstrip(".")
