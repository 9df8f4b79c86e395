"""The notebooks ask for what is graded, and judge it by the same checks."""

import ast
import json
import re
from pathlib import Path

import pytest
from solution_cases import CHAPTERS

from helpers.grading import EXERCISES, grade
from helpers.lab import checks
from helpers.lab.checks.numbers import questions

NOTEBOOKS = {int(path.name[:2]): path for path in (Path(__file__).parents[2] / "notebooks").glob("0[1-7]_*.ipynb")}
WRITTEN = [exercise for exercise in EXERCISES.values() if exercise.check is not checks.number]


def cells(chapter: int, kind: str) -> list[str]:
    notebook = json.loads(NOTEBOOKS[chapter].read_text())
    return ["".join(cell["source"]) for cell in notebook["cells"] if cell["cell_type"] == kind]


@pytest.mark.parametrize("exercise", WRITTEN, ids=lambda exercise: exercise.name)
def test_a_notebook_calls_the_check_that_grades(exercise):
    call = ast.parse(next(c for c in cells(exercise.chapter, "code") if f"({exercise.name}" in c)).body[-1].value
    assert getattr(checks, call.func.attr) is exercise.check
    assert call.args[0].id == exercise.name
    assert {keyword.arg: ast.literal_eval(keyword.value) for keyword in call.keywords} == exercise.options


@pytest.mark.parametrize("chapter", CHAPTERS.values())
def test_each_number_is_asked_for_and_has_its_line(chapter):
    asked, (handed_in,) = "\n".join(cells(chapter, "markdown")), [c for c in cells(chapter, "code") if "numbers(" in c]
    names = re.findall(r"^(\w+) = None", handed_in, re.MULTILINE)
    assert names == list(questions()[chapter])
    assert all(f"(`{name}`)" in asked for name in names)
    assert handed_in.endswith(f"checks.numbers({chapter}, globals())")


@pytest.mark.parametrize("chapter", CHAPTERS.values())
def test_every_exercise_asks_for_something_that_is_graded(chapter):
    text = cells(chapter, "markdown")
    single = [cell for cell in text if cell.startswith("### Exercise ")]
    several = [
        item
        for cell in text
        if cell.startswith("### More exercises")
        for item in re.split(r"^\d\. ", cell, flags=re.M)[1:]
    ]
    written = len([exercise for exercise in WRITTEN if exercise.chapter == chapter])
    assert single and all(f"### Exercise {number}\n" in cell for number, cell in enumerate(single, 1))
    assert sum("(`" not in item for item in single + several) <= written
    assert all("(`" in item for item in several if "Write a function" not in item)


def test_notebooks_as_they_are_handed_out_attempt_nothing():
    for one in grade(NOTEBOOKS.values()):
        assert {each.verdict for each in one.graded} == {"not attempted"}
        assert one.points == 0 and one.most > 0 and one.faults == []
