"""Solutions as students write them: right ones pass, and of wrong ones it is said what is wrong."""

from collections import Counter

import pytest
from solution_cases import CHAPTERS, faults, solutions

from helpers.grading import EXERCISES


def test_every_exercise_has_right_solutions_and_wrong_ones():
    counts = Counter((each.exercise, bool(each.says)) for each in solutions())
    assert {name for name, _ in counts} == set(EXERCISES)
    assert all(counts[name, False] >= 1 and counts[name, True] >= 1 for name in EXERCISES)
    several = [name for name in EXERCISES if counts[name, False] >= 2 and counts[name, True] >= 3]
    assert len(several) >= len(EXERCISES) / 2


@pytest.mark.long
def test_three_of_each_chapter_are_graded_as_they_are(tmp_path):
    chosen = []
    for chapter in CHAPTERS.values():
        mine = [each for each in solutions() if each.chapter == chapter]
        chosen += [next(each for each in mine if not each.says), *[each for each in mine if each.says][:2]]
    assert faults(chosen, tmp_path, seed=0) == []


@pytest.mark.long
@pytest.mark.parametrize("chapter", CHAPTERS.values(), ids=list(CHAPTERS))
def test_all_of_a_chapter_are_graded_as_they_are(chapter, tmp_path):
    assert faults([each for each in solutions() if each.chapter == chapter], tmp_path, seed=1) == []


@pytest.mark.long
def test_right_ones_are_right_whatever_is_drawn(tmp_path):
    right = [each for each in solutions() if not each.says and EXERCISES[each.exercise].points > 1]
    for seed in (2**24 - 1, 12_345, *range(2, 8)):
        assert faults(right, tmp_path, seed) == []
