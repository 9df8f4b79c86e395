"""The interval and the verdict of a trial, on made-up machines."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from helpers.lab.estimate import LUCK, students
from helpers.lab.trials import FASTER, SLOWER, estimate
from helpers.lab.trials.simulation import MACHINES, coverage, simulated


@pytest.mark.parametrize("machine", MACHINES)
def test_intervals_cover_and_nulls_are_no_difference(machine):
    covered, false_verdicts = coverage(machine, starts=3, rounds=8, trials=100)
    assert covered >= 0.9
    assert false_verdicts <= 0.03


@pytest.mark.parametrize(("ratio", "verdict"), [(0.8, FASTER), (1.25, SLOWER)])
def test_a_difference_beyond_the_luck_is_named(ratio, verdict):
    generator = np.random.default_rng(0)
    result = estimate([simulated(generator, 10, ratio, **MACHINES["quiet"]) for _ in range(3)])
    assert result.verdict == verdict
    assert result.low < ratio < result.high


def test_one_start_of_two_processes_shows_no_difference_of_2_percent():
    generator = np.random.default_rng(0)
    once = [simulated(generator, 50, 0.98, noise=0.001)]
    assert estimate(once).verdict.startswith("no difference above")
    assert estimate(once, luck=0.0).verdict == FASTER
    assert estimate(once, luck=0.3).verdict == "no difference above 170 %"


def test_too_few_pairs_are_no_estimate_and_equal_ones_are():
    assert estimate([]) is None
    assert estimate([[0.1, 0.1, 0.1]]) is None
    assert estimate([[0.1] * 4], luck=0.0).half_width == pytest.approx(0)


@settings(max_examples=30, deadline=None)
@given(st.lists(st.floats(-1, 1), min_size=4, max_size=30))
def test_swapped_sides_give_the_inverse(logs):
    one, other = estimate([logs]), estimate([[-log for log in logs]])
    assert one.ratio == pytest.approx(1 / other.ratio)
    assert one.low <= one.ratio <= one.high
    assert one.low == pytest.approx(1 / other.high, rel=0.02)


def test_more_starts_narrow_what_more_pairs_cannot():
    generator = np.random.default_rng(0)
    starts = [simulated(generator, 40, 1.0, luck=LUCK) for _ in range(4)]
    assert estimate(starts).half_width < 0.7 * estimate(starts[:1]).half_width


@pytest.mark.parametrize(("freedom", "tabulated"), [(1, 12.706), (2, 4.303), (4, 2.776), (10, 2.228), (1000, 1.962)])
def test_students_quantiles_are_those_of_the_tables(freedom, tabulated):
    assert students(0.95, freedom) == pytest.approx(tabulated, rel=0.01)
