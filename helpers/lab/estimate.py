"""The ratio of two programs' times from pairs of turns, with its interval.

A pair is two turns that follow each other, A B or B A; its log ratio is free of the machine's drift. A start is one
life of the two programs: each process has luck of its own (where its memory lies, which core it is on) that no number
of pairs averages out. So the interval has two parts: the spread of the pairs within a start, by a bootstrap, and the
luck of the starts, whose variance is estimated from the starts together with `LUCK`, what null trials showed before.
"""

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from statistics import NormalDist
from typing import Any

import numpy as np

LUCK = 0.02  # standard deviation of the log ratio of a program against itself, over starts in processes of their own
# The same on a CPU where a process returns the pages of freed memory: 0.02 to 0.17 of six small trainings on two cores.
# What the C library asks for anew in each step differs between two starts. With pages kept all six are near `LUCK`.
LUCK_RETURNED = 0.1
LUCK_HERE = 0.002  # over trials of functions in one process
WEIGHT = 8  # starts that `LUCK` counts as, beside those of the trial
SHOWN, DECIDED = 0.95, 0.99  # confidence of the interval that is shown, and of a verdict
RESAMPLES = 400
LEAST_PAIRS = 4  # within a start; fewer have no spread that could be estimated
FASTER, SLOWER = "faster", "slower"
STATUS = "status"  # the column of a row that says "ok", or why there are no figures

Row = dict[str, Any]  # of a table: its configuration and what was measured


@dataclass(frozen=True)
class Estimate:
    """The time of a program as a ratio to its baseline's: below 1 is faster."""

    ratio: float
    low: float
    high: float
    pairs: int
    starts: int
    verdict: str

    @property
    def half_width(self) -> float:
        """Half the width of the interval, as a share of the ratio."""
        return (self.high - self.low) / 2 / self.ratio

    def row(self) -> dict[str, float | int | str]:
        """The columns of a record."""
        return asdict(self)


def estimate(starts: Sequence[Sequence[float] | np.ndarray], luck: float = LUCK, seed: int = 0) -> Estimate | None:
    """The mean over starts of each start's median log ratio; None as long as no start has enough pairs."""
    logs = [np.asarray(start, dtype=float) for start in starts if len(start) >= LEAST_PAIRS]
    if not logs:
        return None
    generator = np.random.default_rng(seed)
    medians = np.array([np.median(start) for start in logs])
    within = np.array([_variance_of_median(start, generator) for start in logs])
    count, pairs = len(logs), sum(map(len, logs))
    centre = float(medians.mean())
    between = medians.var(ddof=1) if count > 1 else 0.0
    seen = max(between - within.mean(), 0.0) * (count - 1)  # beyond what the pairs' spread explains
    luck_variance = (WEIGHT * luck**2 + seen) / (WEIGHT + count - 1)
    parts = np.array([within.sum() / count**2, luck_variance / count]) + 1e-99  # some, where all pairs are equal
    rounds = sum(len(start) // 2 for start in logs)
    freedom = parts.sum() ** 2 / (parts**2 / [max(rounds - count, 1), WEIGHT + count - 1]).sum()
    error = math.sqrt(parts.sum())

    def bounds(confidence: float) -> tuple[float, float]:
        reach = error * students(confidence, freedom)
        return math.exp(centre - reach), math.exp(centre + reach)

    low, high = bounds(DECIDED)
    return Estimate(math.exp(centre), *bounds(SHOWN), pairs, count, _verdict(low, high))


def _verdict(low: float, high: float) -> str:
    """What an interval of 99 % leaves: a difference, or the largest that it can't exclude."""
    if high < 1:
        return FASTER
    if low > 1:
        return SLOWER
    return f"no difference above {float(f'{100 * max(high - 1, 1 - low):.2g}'):g} %"


def _variance_of_median(logs: np.ndarray, generator: np.random.Generator) -> float:
    """By a bootstrap over the pairs; those of one round, A B B A, are drawn together: they share its luck."""
    rounds = len(logs) // 2
    drawn = generator.integers(rounds, size=(RESAMPLES, rounds))
    resampled = np.stack([logs[2 * drawn], logs[2 * drawn + 1]], axis=-1).reshape(RESAMPLES, -1)
    return float(np.median(resampled, axis=1).var()) * rounds / max(rounds - 1, 1)


def students(confidence: float, freedom: float) -> float:
    """The two-sided quantile of Student's t: exact for 1 and 2, else by Cornish and Fisher's expansion."""
    if freedom == 1:
        return math.tan(math.pi * confidence / 2)
    if freedom == 2:
        return confidence * math.sqrt(2 / (1 - confidence**2))
    z = NormalDist().inv_cdf(0.5 + confidence / 2)
    first = (z**3 + z) / 4
    second = (5 * z**5 + 16 * z**3 + 3 * z) / 96
    third = (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384
    fourth = (79 * z**9 + 776 * z**7 + 1482 * z**5 - 1920 * z**3 - 945 * z) / 92160
    return z + first / freedom + second / freedom**2 + third / freedom**3 + fourth / freedom**4
