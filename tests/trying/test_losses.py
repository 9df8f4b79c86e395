"""The verdict on a change's losses beside those of the base and of another seed."""

import math

import pytest

from helpers.trying.losses import DIFFERENT, EQUAL, UNSEEN, WITHIN, compare

BASE, SEED = [2.0, 1.5, 1.0], [2.1, 1.4, 1.1]


@pytest.mark.parametrize(
    ("losses", "verdict"),
    [
        (BASE, EQUAL),
        (BASE[:2], EQUAL),
        ([2.0, 1.5001, 1.0002], WITHIN),
        ([2.0, 2.5, 3.0], DIFFERENT),
        ([2.0, math.nan, math.nan], DIFFERENT),
        ([None, None], UNSEEN),
    ],
)
def test_the_verdict(losses, verdict):
    assert compare(BASE, losses, SEED).startswith(verdict)


def test_the_distances_stand_beside_each_other():
    assert compare(BASE, [2.0, 1.5, 1.009], SEED) == "within seeds: 0.2 %, seeds 6.7 %, 3 steps"


def test_without_another_seed_a_difference_is_a_difference():
    assert compare(BASE, [2.0, 1.5, 1.1], []).startswith(DIFFERENT)
