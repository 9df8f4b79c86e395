"""What a start of two equal programs adds to the ratio of their times: the standard deviation of its logarithm.

A null trial's log ratio has that variance over its starts, and the spread of its pairs on top. So the root mean square
over null trials is too large rather than too small.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist

import numpy as np
import pandas as pd

from ..estimate import LUCK, SHOWN
from ..machine import device

# `of_null_trials` of the recorded table tool/nulls, two cores of an EPYC: 40 trials of programs that keep the
# pages of freed memory, 15 of such that return them, and get others back in each step. Nulls on a GPU aren't recorded.
KEPT, RETURNED = 0.034, 0.044
LEAST_TRIALS = 6


@dataclass(frozen=True)
class StartNoise:
    """The standard deviation of a start's log ratio, with its interval, from so many null trials."""

    value: float
    low: float
    high: float
    trials: int


def start_noise(kept: bool) -> float:
    """What a trial assumes of programs that keep the pages of freed memory, or return them."""
    if device().type != "cpu":
        return LUCK
    return KEPT if kept else RETURNED


def of_null_trials(rows: pd.DataFrame, kept: bool) -> StartNoise | None:
    """What the rows of null trials say; None of too few."""
    rows = rows[(rows["allocator"] == "kept") == kept].dropna(subset="ratio") if "ratio" in rows else rows
    if len(rows) < LEAST_TRIALS:
        return None
    return of_ratios(np.log(rows["ratio"].astype(float)), rows["starts"].astype(int))


def of_ratios(logs: Sequence[float], starts: Sequence[int]) -> StartNoise:
    """From each trial's log ratio, a mean over its starts."""
    squares, trials = float((np.square(logs) * starts).sum()), len(logs)
    low, high = (math.sqrt(squares / _chi_squared(0.5 + side * SHOWN / 2, trials)) for side in (1, -1))
    return StartNoise(math.sqrt(squares / trials), low, high, trials)


def _chi_squared(share: float, freedom: int) -> float:
    """Its quantile, by Wilson and Hilferty."""
    part = 2 / (9 * freedom)
    return freedom * (1 - part + NormalDist().inv_cdf(share) * math.sqrt(part)) ** 3
