"""Numbers that a sentence may quote: with their interval, or with what they were derived from.

    total = paired(row)                              # from the columns ratio low high pairs of a trial
    f"{total}"                                       # 2.4× (2.3 to 2.5, 12 pairs)
    f"{over(pick(rows, 'median_ms', variant='eager'), pick(rows, 'median_ms', variant='fused'))}"
                                                     # 3.1× (2.9 to 3.3, unpaired): from the spread of both
    f"{derived(11 / 9, 'eleven products for nine')}"                                                 # 1.22×
    total.at_least(2).outcome                        # holds, does not hold, undecided or not measured

A number that the records lack is still a `Number`: it says what is missing wherever it would be quoted.
"""

import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from statistics import NormalDist
from typing import Any, SupportsFloat

import numpy as np
import pandas as pd

from ..lab.device_share import DEVICE_SHARE, HOST_BOUND, host_bound
from ..lab.estimate import DECIDED, EFFECT, NEGLIGIBLE, NONE, SHOWN, UNDECIDED, students, verdict_class

TIMES, PERCENT, NOISY = "×", "%", "†"
NOT_MEASURED = "not measured"
YES_NO = {"True": "yes", "False": "no"}
HOLDS, FAILS = "holds", "does not hold"
WIDTH = 2 * NormalDist().inv_cdf(0.8)  # from the 20th to the 80th percentile, in standard deviations
NORMAL = NormalDist().inv_cdf(0.5 + SHOWN / 2)  # half the width of a 95 % interval, in standard deviations
OF_MEDIAN = math.sqrt(math.pi / 2)  # standard error of a median, in those of a mean
TIMED = ("median_ms", "step_ms", "tokens_per_s", "real_tokens_per_s")  # whose spread is that of p20_ms and p80_ms
OF_TIME = ("_ms", "us", "_s")  # ends of names of columns that noise changes


@dataclass(frozen=True)
class Number:
    """A value with its unit; `low` and `high` bound it with 95 % confidence, over `n` pairs.

    `derivation` says from what arithmetic or count a value comes that isn't timed and so needs no interval. A number
    that wasn't measured has the value NaN, and `missing` says what the records lack. `decimals` are those it is shown
    with; None chooses them by its size. `reach` is half the width of its logarithm's 95 % interval, where its record
    tells the spread: it is shown only beside a limit, and gives ratios their interval. `noisy` is a measurement beside
    others' load, or at an unusual rate of the machine, and is marked with a dagger. `verdict` is the one that a trial
    recorded, which counts its looks.
    """

    value: float
    unit: str = ""
    low: float | None = None
    high: float | None = None
    n: int = 0
    derivation: str = ""
    missing: str = ""
    decimals: int | None = None
    reach: float = math.nan
    noisy: bool = False
    verdict: str = ""

    @property
    def measured(self) -> bool:
        return not math.isnan(self.value)

    def __float__(self) -> float:
        return float(self.value)

    def __str__(self) -> str:
        return format(self)

    def __format__(self, form: str) -> str:
        """In full, with its interval and pairs. `bare` leaves out the pairs, `brief` the interval, too.

        A number of decimals, `1`, goes with each.
        """
        words = form.split()
        decimals = next((int(word) for word in words if word.isdigit()), self.decimals)
        if not self.measured:
            return f"[{NOT_MEASURED}: {self.missing}]"
        text = self._text(self.value, decimals) + self._unit()
        text += NOISY if self.noisy else ""
        if self.low is None or self.high is None:
            bare = "bare" in words or self.unit != TIMES or self.derivation
            return text if bare else f"{text} (unpaired)"
        if "brief" in words:
            return text
        pairs = f", {self.n} pairs" if self.n else ", unpaired" if self.unit == TIMES and not self.derivation else ""
        pairs = "" if "bare" in words else pairs
        return f"{text} ({self._text(self.low, decimals)} to {self._text(self.high, decimals)}{pairs})"

    def _unit(self) -> str:
        return self.unit if self.unit in (TIMES, PERCENT, "") else f" {self.unit}"

    def _text(self, value: float, decimals: int | None) -> str:
        scaled = 100 * value if self.unit == PERCENT else value
        if decimals is not None:
            return f"{round(scaled, decimals) + 0.0:,.{decimals}f}"  # never -0
        if self.unit == TIMES:
            return f"{scaled:.2f}" if scaled < 2 else f"{scaled:.1f}"
        return f"{scaled:.1f}" if self.unit == PERCENT else number(scaled)

    def bounded(self) -> "Number":
        """With the interval that its reach gives, where it has none of its own."""
        if self.low is not None or math.isnan(self.reach):
            return self
        return replace(self, low=self.value * math.exp(-self.reach), high=self.value * math.exp(self.reach))

    def at_most(self, limit: float) -> "Verdict":
        return Verdict(self.bounded(), "at most", limit)

    def at_least(self, limit: float) -> "Verdict":
        return Verdict(self.bounded(), "at least", limit)


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
    cells = chosen[column].dropna()  # a wrong column raises, also where the row is missing
    if not len(cells):
        return lacking(f"{column} of {conditions}", unit)
    row = chosen.iloc[0]
    noisy = is_noisy(row) and column.endswith(OF_TIME)
    return Number(float(cells.iloc[0]), unit, decimals=decimals, reach=_reach(row, column), noisy=noisy)


def of_kernels(number: Number, name: str, *rows: Any) -> Number:
    """A number that tells of kernels, taken from these rows: not measured if one of them is host-bound."""
    return lacking(f"{name} that isn't host-bound", number.unit) if any(map(host_bound, rows)) else number


def timed(rows: pd.DataFrame, names: Iterable[str]) -> pd.DataFrame:
    """These columns for `table`, and the device's share where rows have one: it marks those that are host-bound."""
    return rows[[*names, *({DEVICE_SHARE} & set(rows))]]


def marked(value: float, row: Any) -> float | str:
    """A cell of a table whose rows aren't a record's: the row's time, with the marks of a noisy or host-bound one."""
    marks = (NOISY if is_noisy(row) else "") + (HOST_BOUND if host_bound(row) else "")
    return f"{number(value)}{marks}" if marks else value


def _reach(row: pd.Series, column: str) -> float:
    names = ("p20_ms", "p80_ms") if column in TIMED else (f"{column}_p20", f"{column}_p80")
    return reach_of_median(*(row.get(name, math.nan) for name in (*names, "n")))


def reach_of_median(p20: float, p80: float, runs: float) -> float:
    """Half the width of a median's 95 % interval, in logarithms, from the percentiles of its runs; NaN without them."""
    if not (p20 > 0 and p80 > p20 and runs > 1):
        return math.nan
    return OF_MEDIAN * math.log(p80 / p20) / WIDTH / math.sqrt(runs) * students(SHOWN, runs - 1)


def of_rounds(row: pd.Series, column: str, decimals: int | None = None) -> Number:
    """A ratio whose variants took turns, from its median over n rounds and their spread."""
    runs = 0 if math.isnan(reach := _reach(row, column)) else int(row["n"])
    return Number(float(row[column]), TIMES, n=runs, decimals=decimals, reach=reach, noisy=is_noisy(row)).bounded()


def paired(row: Any, unit: str = TIMES) -> Number:
    """The ratio of a trial, from a row with the columns ratio, low, high and pairs."""
    ends = float(row["low"]), float(row["high"])
    return Number(float(row["ratio"]), unit, *ends, int(row["pairs"]), noisy=is_noisy(row), verdict=_verdict_of(row))


def speedup(row: Any, decimals: int | None = None) -> Number:
    """How many times as fast as its baseline a row's variant is; with the interval of a trial, if it has one."""
    if "low" in row and row["low"] == row["low"]:
        ends, noisy = (1 / row["high"], 1 / row["low"]), is_noisy(row)
        about = Number(1 / row["ratio"], TIMES, *ends, int(row["pairs"]), decimals=decimals, noisy=noisy)
        return replace(about, verdict=_verdict_of(row))
    return Number(row["baseline_ms"] / row["median_ms"], TIMES, decimals=decimals)


def _verdict_of(row: Any) -> str:
    return row["verdict"] if isinstance(row.get("verdict"), str) else ""


def is_noisy(row: Any) -> bool:
    """Whether a row was recorded beside noise, and stayed so."""
    return isinstance(row.get("noisy"), str) and bool(row["noisy"])


def quiet(rows: pd.DataFrame) -> pd.DataFrame:
    """The rows that weren't recorded beside noise; all, if there are no others."""
    still = rows[[not is_noisy(row) for row in rows.to_dict("records")]]
    return still if len(still) else rows


def share_of(right: int, total: int) -> Number:
    """A counted share with Wilson's 95 % interval."""
    if not total:
        return lacking("cases", PERCENT)
    share, weight = right / total, NORMAL**2 / total
    centre, reach = share + weight / 2, NORMAL * math.sqrt(share * (1 - share) / total + weight / 4 / total)
    low, high = max(0.0, (centre - reach) / (1 + weight)), (centre + reach) / (1 + weight)
    return Number(share, PERCENT, low, high, derivation="counted", decimals=0)


def over(value: Number, baseline: Number, luck: float = 0.0) -> Number:
    """Their ratio; from two derived numbers it is derived.

    Both were measured apart. The interval comes from that of each, or from the spread of its runs, where the record
    tells them; `luck` is the standard deviation of the ratio of two processes, where each had its own.
    """
    if not (value.measured and baseline.measured):
        return lacking(value.missing or baseline.missing, TIMES)
    ratio, reach = value.value / baseline.value, math.hypot(_known(value), _known(baseline), luck * NORMAL)
    both = value.derivation and baseline.derivation and math.isnan(reach)
    derivation = f"{value.derivation} / {baseline.derivation}" if both else ""
    noisy = value.noisy or baseline.noisy
    return Number(ratio, TIMES, derivation=derivation, reach=reach, noisy=noisy).bounded()


def chained(gain: Number, before: Number) -> Number:
    """The gain of two changes, each over the one before it, from a trial of each."""
    if not (gain.measured and before.measured):
        return lacking(gain.missing or before.missing, gain.unit)
    product, reach = gain.value * before.value, math.hypot(_known(gain), _known(before))
    known = replace(gain, value=product, low=None, high=None, reach=reach, n=min(gain.n, before.n), verdict="")
    noisy = gain.noisy or before.noisy
    return replace(known.bounded(), noisy=noisy, n=0, derivation="product of two trials")  # no pair is of both


def _known(number: Number) -> float:
    """Half the width of a number's interval, in logarithms; NaN if it has none."""
    if number.low and number.high:
        return math.log(number.high / number.low) / 2
    return number.reach


def cost(rows: pd.DataFrame, group: str, after: str, before: str | None) -> tuple[Number, Number]:
    """Of two groups of trainings, the later peak of memory over the earlier, and how much higher the loss ends."""
    loss = "loss" if "loss" in rows else "validation_loss"
    means = rows.groupby(group)[["peak_gib", loss]].mean().reindex([before, after])
    (peak, first), (peak_after, last) = means.to_numpy()
    ratio = Number(peak_after / peak, TIMES, derivation="allocated bytes", decimals=2, missing=after)
    return ratio, Number(last - first, decimals=2, missing=after)


def judged(gain: Number, drift: float = 0.1) -> tuple[str, float]:
    """The verdict of a trial, else `EFFECT` where the 99 % interval leaves 1 out, `NONE` where it lies within 5 % of it
    and `UNDECIDED`; and the largest effect that the interval doesn't exclude.

    A ratio without an interval has an effect if it is further from 1 than the machine's `drift`, else it is undecided.
    """
    centre = abs(math.log(gain.value))
    if gain.low is None or gain.high is None:
        return EFFECT if gain.measured and abs(gain.value - 1) > drift else UNDECIDED, math.nan
    freedom = max(gain.n - 1, 1) if gain.n else math.inf
    reach = students(DECIDED, freedom) / students(SHOWN, freedom) * math.log(gain.high / gain.low) / 2
    most = math.expm1(min(centre + reach, 99))
    if gain.verdict:
        bound = re.search(r"above ([\d.]+) %", gain.verdict)
        return verdict_class(gain.verdict), float(bound[1]) / 100 if bound else most
    return EFFECT if centre > reach else NONE if most <= NEGLIGIBLE else UNDECIDED, most


def told(gain: Number, drift: float = 0.1) -> str:
    """A speedup as a cell of a table; one without an effect by its verdict: "≤ 4.1 %", "undecided"."""
    kind, most = judged(gain, drift)
    return f"{gain:bare}" if kind == EFFECT else f"≤ {100 * most:.2g} %" if kind == NONE else kind


def of_class(gains: Mapping[str, Number], kind: str, drift: float = 0.1) -> str:
    """The names of one class, each with the largest effect that isn't excluded: `workers ≤ 4.1 %, packed ≤ 30 %`."""
    known = {name: judged(gain, drift) for name, gain in gains.items() if gain.measured}
    texts = [
        name if most != most else f"{name} ≤ {float(f'{100 * most:.2g}'):g} %"
        for name, (of, most) in known.items()
        if of == kind
    ]
    return ", ".join(texts) or "none"


def over_runs(values: pd.Series, baselines: pd.Series) -> Number:
    """The ratio of runs that differ in one thing, matched by index, such as the seed.

    With Student's 95 % interval, if there are two runs or more.
    """
    logs = np.log((values / baselines).dropna())
    if not len(logs):
        return lacking("runs of both", TIMES)
    centre = float(logs.mean())
    if len(logs) == 1:
        return Number(math.exp(centre), TIMES)
    spread = float(logs.std()) / math.sqrt(len(logs)) * students(SHOWN, len(logs) - 1)
    return Number(math.exp(centre), TIMES, math.exp(centre - spread), math.exp(centre + spread), len(logs))


def mean_of(differences: pd.Series, unit: str, missing: str, decimals: int = 2) -> Number:
    """The mean over runs, such as seeds, with Student's 95 % interval; not measured with fewer than two."""
    known = differences.dropna()
    if len(known) < 2:
        return lacking(f"two runs or more of {missing}", unit)
    reach = students(SHOWN, len(known) - 1) * known.std() / math.sqrt(len(known))
    return Number(known.mean(), unit, known.mean() - reach, known.mean() + reach, len(known), decimals=decimals)


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
