"""Pairs of equal work: of turns that are unlike one another, as many together as it takes."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from helpers.lab.trials.programs import alike, log_ratios, stretch, stretch_ratios

EPOCH = [1.0] * 4 + [6.0]  # four turns, and one in which an epoch ends


@pytest.mark.parametrize(
    ("seconds", "size", "expected"),
    [
        ([1.0, 1.9], 1, True),
        ([1.0, 1.0, 9.0], 1, True),  # one may have been disturbed
        ([1.0, 2.1, 9.0], 1, False),
        ([1.0, 2.0, 9.0], 1, True),
        (EPOCH * 4, 1, False),
        (EPOCH * 4, 5, True),
        ([3.0], 1, True),
    ],
)
def test_stretches_are_alike_up_to_twice_the_shortest_but_for_one(seconds, size, expected):
    assert alike(seconds, size) == expected


def test_a_stretch_is_the_shortest_that_is_alike_or_the_longest_of_which_there_are_enough():
    assert stretch([1.0] * 20, [2.0] * 20) == 1
    assert stretch(EPOCH * 8, EPOCH * 8) == 5
    assert stretch([1.0] * 40, EPOCH * 8) == 5, "of the side that is unlike"
    assert stretch(EPOCH * 2, EPOCH * 2) == 2  # of ten turns, five would be two stretches
    assert stretch([1.0] * 3, [1.0] * 3) == 1


@settings(max_examples=40, deadline=None)
@given(st.lists(st.floats(0.9, 1.1), min_size=4, max_size=40), st.floats(0.5, 2))
def test_turns_of_the_same_steps_are_pairs_of_their_own(before, ratio):
    after = [ratio * seconds for seconds in before]
    assert stretch_ratios(before, after) == pytest.approx([np.log(ratio)] * len(before))


def test_a_change_of_what_ends_an_epoch_is_a_change_of_all_its_steps():
    """A turn in five takes half as long: the middle of the pairs would say that nothing is faster."""
    after = [seconds if seconds == 1 else 3.0 for seconds in EPOCH] * 8
    assert stretch_ratios(EPOCH * 8, after) == pytest.approx([np.log(7 / 10)] * 8)
    assert len(stretch_ratios(EPOCH[-3:], after[2:5])) == 3  # too few to say


def test_pairs_whose_middle_is_within_the_error_of_the_whole_stay():
    generator = np.random.default_rng(0)
    before, after = (list(generator.lognormal(0.0, 0.2, 40)) for _ in range(2))
    assert stretch_ratios(before, after) == log_ratios(before, after)
