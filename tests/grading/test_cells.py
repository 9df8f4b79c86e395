"""What is read of a file, and which solutions are the same but for names."""

import pytest

from helpers.grading import grade
from helpers.grading.cells import Cell, Handed

MINE = '''
def best_fit(lengths, capacity):
    """My own."""
    packs, room = [], []
    for index in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        fitting = [place for place in range(len(room)) if room[place] >= lengths[index]]
        if not fitting:
            packs.append([]); room.append(capacity); fitting = [len(packs) - 1]
        packs[min(fitting, key=room.__getitem__)].append(index)
    return packs
'''
RENAMED = (
    MINE.replace("fitting", "where").replace("index", "n").replace("[], []", "[ ], [ ]  # packs").replace("My", "An")
)


@pytest.mark.parametrize(
    ("source", "equal"), [(RENAMED, True), (MINE.replace(">=", ">"), False), (MINE.replace("- 1", "- 2"), False)]
)
def test_names_layout_and_docstrings_make_no_difference_and_operations_do(source, equal):
    mine, other = (Handed([Cell("cell 1", each)], []).normalised("best_fit") for each in (MINE, source))
    assert mine and (mine == other) is equal


def test_a_definition_that_is_small_is_equal_to_none():
    assert Handed([Cell("cell 1", "def my_mfu(model, *rest): return 1")], []).normalised("my_mfu") == ""


def test_equal_solutions_are_listed_with_each(tmp_path):
    for name, source in {"a.py": MINE, "b.py": RENAMED, "c.py": MINE.replace("- 1", "- 2")}.items():
        (tmp_path / name).write_text(source)
    graded = [one.row()["exercises"] for one in grade(sorted(tmp_path.iterdir()))]
    rows = [row for exercises in graded for row in exercises if row["exercise"] == "best_fit"]
    assert [row["equal"] for row in rows] == [["a.py", "b.py"], ["a.py", "b.py"], []]


def test_names_within_functions_hand_nothing_in():
    handed = Handed([Cell("cell 1", "def f():\n    grown = 1\n    return grown"), Cell("cell 2", "processed = 1")], [])
    assert "grown" not in handed and "processed" in handed
