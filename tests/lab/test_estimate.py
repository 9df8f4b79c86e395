"""The interval and the verdict of a trial, on made-up machines."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from simulated_trials import MACHINES, simulated, until_decided

from helpers.lab.estimate import LUCK, WEIGHT, students, verdict_class
from helpers.lab.trials import FASTER, SLOWER, estimate


@pytest.mark.parametrize(("ratio", "verdict"), [(0.8, FASTER), (1.25, SLOWER)])
def test_a_difference_beyond_the_luck_is_named(ratio, verdict):
    generator = np.random.default_rng(0)
    result = estimate([simulated(generator, 10, ratio, **MACHINES["quiet"]) for _ in range(3)])
    assert result.verdict == verdict
    assert result.low < ratio < result.high


def test_one_start_of_two_processes_shows_no_difference_of_2_percent():
    generator = np.random.default_rng(0)
    once = [simulated(generator, 50, 0.98, noise=0.001)]
    assert estimate(once).verdict.startswith("undecided, detects")
    assert estimate(once, luck=0.0).verdict == FASTER


def test_a_null_names_an_effect_of_at_most_5_percent_and_without_power_it_is_undecided():
    generator = np.random.default_rng(1)
    logs = simulated(generator, 40, 1.0, noise=0.03)
    decided = estimate([logs], luck=0.0)
    assert decided.verdict.startswith("none above") and float(decided.verdict.split()[2]) <= 5
    few = estimate([logs[:6]], luck=0.0).verdict
    assert few.startswith("undecided, detects") and float(few.split()[2]) > 5


@pytest.mark.parametrize(
    ("verdict", "of"),
    [(FASTER, "effect"), (SLOWER, "effect"), ("none above 4.1 %", "none"), ("undecided, detects 7 %", "undecided")],
)
def test_every_verdict_is_of_one_class(verdict, of):
    assert verdict_class(verdict) == of


def test_the_interval_of_one_start_is_students():
    logs, cut, left = np.arange(-2, 8) / 100, 2, 6  # of ten pairs a fifth is cut off at either end
    winsorized = np.clip(logs, logs[cut], logs[-cut - 1])
    error = np.std(winsorized, ddof=1) * np.sqrt(9 / (left * (left - 1)))
    result = estimate([logs], luck=0.0)
    assert np.log([result.low, result.ratio, result.high]) == pytest.approx(
        0.025 + 2.571 * error * np.array([-1, 0, 1]), abs=1e-4
    )


@pytest.mark.parametrize("machine", MACHINES)
def test_trials_that_end_when_they_have_decided_are_rarely_wrong(machine):
    null, slower = (until_decided(machine, ratio, 100) for ratio in (1.0, 1.1))
    assert null["found"] <= 0.03 and null["holds"] >= 0.9 and null["none_above_5"] > 0.6
    assert slower["found"] > 0.9 and slower["wrong_sign"] == 0 and slower["holds"] >= 0.9


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


@pytest.mark.parametrize(("confidence", "freedom", "rel"), [(0.95, 5, 1e-3), (0.99, 7.5, 1e-3), (0.99, 30, 1e-5)])
def test_between_students_quantiles_lies_the_confidence_by_the_integral_of_its_density(confidence, freedom, rel):
    t = np.linspace(0, students(confidence, freedom), 10_001)
    scale = math.exp(math.lgamma((freedom + 1) / 2) - math.lgamma(freedom / 2)) / math.sqrt(freedom * math.pi)
    inside = 2 * np.trapezoid(scale * (1 + t**2 / freedom) ** (-(freedom + 1) / 2), t)
    assert 1 - inside == pytest.approx(1 - confidence, rel=rel)


def test_the_interval_of_starts_whose_pairs_are_equal_is_that_of_their_luck():
    logs, luck = np.array([0.0, 0.03, 0.09]), 0.01
    result = estimate([[log] * 4 for log in logs], luck=luck)
    variance = (WEIGHT * luck**2 + 2 * logs.var(ddof=1)) / (WEIGHT + 2)  # three starts beside eight that are assumed
    reach = students(0.95, WEIGHT + 2) * np.sqrt(variance / 3)
    assert np.log([result.low, result.ratio, result.high]) == pytest.approx(0.04 + reach * np.array([-1, 0, 1]))
    assert (result.pairs, result.starts) == (12, 3)
