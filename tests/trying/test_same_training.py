"""The verdict on a change's losses beside those of the base and of another seed."""

import math

import pytest

from helpers.trying.same_training import DIFFERENT, EQUAL, UNSEEN, WITHIN, compare, same_text

BASE, SEED = [2.0, 1.5, 1.0], [2.1, 1.4, 1.1]


@pytest.mark.parametrize(
    ("losses", "verdict"),
    [
        (BASE, EQUAL),
        (BASE[:2], EQUAL),
        ([2.0, 1.5001, 1.0002], WITHIN),
        ([2.0, 2.5, 3.0], DIFFERENT),
        ([2.0, math.nan, math.nan], DIFFERENT),
        ([2.0, None, 1.0], DIFFERENT),
    ],
)
def test_the_verdict(losses, verdict):
    assert compare(BASE, losses, SEED).startswith(verdict)


def test_the_distances_stand_beside_each_other():
    assert compare(BASE, [2.0, 1.5, 1.009], SEED) == "within seeds: 0.2 %, seeds 6.7 %, 3 steps"


def test_without_another_seed_a_difference_is_a_difference():
    assert compare(BASE, [2.0, 1.5, 1.1], []).startswith(DIFFERENT)


def test_losses_that_the_base_has_not_say_nothing():
    assert compare([None, None], [1.0, 2.0], [1.0, 1.0]) == UNSEEN


@pytest.mark.parametrize(
    ("text", "exact", "same"),
    [
        ('{"loss": 2.0}', True, True),
        ('{"loss": 2.01}', True, False),
        ('{"loss": 2.01}', False, True),
        ('{"loss": 3.0}', False, False),
        ('{"lass": 2.0}', False, False),
        ('{"loss": 2.0, "last": 1}', False, False),
    ],
)
def test_a_file_holds_the_same_bytes_where_the_training_is_exact_else_numbers_within_seeds(text, exact, same):
    assert same_text(exact, '{"loss": 2.0}', text, '{"loss": 2.1}') is same
