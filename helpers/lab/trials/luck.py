"""What a start of two equal programs adds to the ratio of their times: from recorded null trials.

A null trial's log ratio has the variance luck² over its starts, and the spread of its pairs on top. So the root mean
square over null trials is too large rather than too small. Those of this machine count, else those of its class (CPU or
GPU); without any, as where no records are installed, it is the constant in `estimate`.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist

import numpy as np
import pandas as pd

from ..estimate import LUCK, LUCK_RETURNED, SHOWN
from ..machine import device, device_class, device_name, slug
from ..records import store

LEAST_TRIALS = 6
TABLE = ("profiling", "nulls")


@dataclass(frozen=True)
class Luck:
    """The standard deviation of a start's log ratio, with its interval, from so many null trials."""

    value: float
    low: float
    high: float
    trials: int


def seen(rows: pd.DataFrame, kept: bool) -> Luck | None:
    """What the rows of null trials say of programs that keep the pages of freed memory, or return them."""
    rows = rows[(rows["allocator"] == "kept") == kept].dropna(subset="ratio") if "ratio" in rows else rows
    if len(rows) < LEAST_TRIALS:
        return None
    return of(np.log(rows["ratio"].astype(float)), rows["starts"].astype(int))


def of(logs: Sequence[float], starts: Sequence[int]) -> Luck:
    """From each trial's log ratio, a mean over its starts."""
    squares, trials = float((np.square(logs) * starts).sum()), len(logs)
    low, high = (math.sqrt(squares / _chi_squared(0.5 + side * SHOWN / 2, trials)) for side in (1, -1))
    return Luck(math.sqrt(squares / trials), low, high, trials)


def luck(kept: bool) -> float:
    """What a trial on this machine assumes."""
    assumed = LUCK if kept or device().type != "cpu" else LUCK_RETURNED
    here = slug(device_name())
    like = [name for name in store.devices(cpu=device_class() == "cpu") if name != here]
    known = (seen(store.read(name, *TABLE), kept or device().type != "cpu") for name in (here, *like))
    return next((each.value for each in known if each), assumed)


def _chi_squared(share: float, freedom: int) -> float:
    """Its quantile, by Wilson and Hilferty."""
    part = 2 / (9 * freedom)
    return freedom * (1 - part + NormalDist().inv_cdf(share) * math.sqrt(part)) ** 3
