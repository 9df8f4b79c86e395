"""What a start adds, from null trials: their spread, its interval, and the constants that trials assume.

`null_trials.csv` has trials of six small trainings against themselves, ten seconds each, on two cores of an EPYC,
beside other processes, whose load changes. Two thirds are of programs that keep the pages of freed memory.
"""

import math
from pathlib import Path
from statistics import NormalDist

import numpy as np
import pandas as pd
import pytest

from helpers.lab.estimate import SHOWN
from helpers.lab.trials.programs import KEPT, RETURNED


def spread(logs, starts):
    """The root mean square of a start's log ratio, with its interval: each trial's is a mean over its starts.

    The spread of the pairs is on top, so it is too large rather than too small.
    """
    squares, trials = float((np.square(logs) * starts).sum()), len(logs)
    ends = (math.sqrt(squares / chi_squared(0.5 + side * SHOWN / 2, trials)) for side in (1, -1))
    return math.sqrt(squares / trials), *ends


def chi_squared(share, freedom):
    """Its quantile, by Wilson and Hilferty."""
    part = 2 / (9 * freedom)
    return freedom * (1 - part + NormalDist().inv_cdf(share) * math.sqrt(part)) ** 3


@pytest.mark.parametrize(("true", "starts"), [(0.003, 2), (0.02, 4)])
def test_it_is_the_spread_that_was_put_in_and_its_interval_holds_it(true, starts):
    generator = np.random.default_rng(0)
    drawn = [spread(generator.normal(0, true / starts**0.5, 12), np.full(12, starts)) for _ in range(400)]
    assert np.mean([value for value, _, _ in drawn]) == pytest.approx(true, rel=0.05)
    assert 0.92 < np.mean([low < true < high for _, low, high in drawn]) < 0.98


@pytest.mark.parametrize(("allocator", "constant"), [("kept", KEPT), ("default", RETURNED)])
def test_the_recorded_null_trials_say_what_trials_assume(allocator, constant):
    rows = pd.read_csv(Path(__file__).with_name("null_trials.csv")).dropna(subset="ratio")
    rows = rows[rows["allocator"] == allocator]
    _, low, high = spread(np.log(rows["ratio"]), rows["starts"])
    assert low < constant < high
