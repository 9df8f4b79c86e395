"""The notebooks ask for what is graded, and judge it by the same checks."""

import ast
import importlib
import json
import re
import tomllib
from pathlib import Path

import pytest
from solution_cases import CHAPTERS

from helpers import checks
from helpers.checks.numbers import ANSWERS, questions
from helpers.course.handout import notebook
from helpers.grading import EXERCISES, grade
from helpers.grading.cells import Cell

NOTEBOOKS = {int(path.name[:2]): path for path in (Path(__file__).parents[2] / "notebooks").glob("0[1-7]_*.ipynb")}
WRITTEN = [exercise for exercise in EXERCISES.values() if exercise.check is not checks.number]


def handed_out(chapter: int) -> dict:
    return notebook(json.loads(NOTEBOOKS[chapter].read_text()))


def cells(chapter: int, kind: str, tag: str = "") -> list[str]:
    """Sources of a notebook as it is handed out, of those that have a tag."""
    of_kind = [cell for cell in handed_out(chapter)["cells"] if cell["cell_type"] == kind]
    return ["".join(cell["source"]) for cell in of_kind if not tag or tag in cell["metadata"].get("tags", [])]


@pytest.mark.parametrize("exercise", WRITTEN, ids=lambda exercise: exercise.name)
def test_a_notebook_calls_the_check_that_grades(exercise):
    name = re.compile(rf"checks\.\w+\({exercise.name}\b")
    call = ast.parse(next(c for c in cells(exercise.chapter, "code") if name.search(c))).body[-1].value
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


@pytest.mark.parametrize("chapter", CHAPTERS.values())
def test_cells_of_exercises_have_their_tag_and_slow_ones_define_none(chapter):
    names = {name for name, exercise in EXERCISES.items() if exercise.chapter == chapter}
    defined = {source: names & Cell("", source).names for source in cells(chapter, "code")}
    marked = cells(chapter, "code", "exercise")
    assert set().union(*(defined[source] for source in marked)) == names
    assert all(source in marked for source, own in defined.items() if "NotImplementedError" in source and own)
    slow = "\n".join(cells(chapter, "code", "slow"))
    assert not any(re.search(rf"^((class|def) {name}\b|{name} =)", slow, re.MULTILINE) for name in names)


@pytest.mark.parametrize("exercise", WRITTEN, ids=lambda exercise: exercise.name)
def test_what_an_exercise_is_to_be_written_without_exists(exercise):
    for piece in exercise.without:
        where, name = (piece if piece.startswith("torch.") else f"helpers.{piece}").rsplit(".", 1)
        assert callable(getattr(importlib.import_module(where), name))


def test_a_wrong_number_is_told_without_the_right_one():
    for name, answer in tomllib.loads(ANSWERS.read_text()).items():
        right = [eval(end) for end in ([answer["right"]] if isinstance(answer["right"], str) else answer["right"])]
        for given in (0.7 * right[0] - 0.3, 1.4 * right[-1] + 0.3):
            about = checks.number(given, name).lines[0][1].rpartition(": ")[2]
            assert about == f"{given:g} is wrong"


@pytest.mark.parametrize("chapter", [6, *(pytest.param(n, marks=pytest.mark.long) for n in (1, 2, 3, 4, 5, 7))])
def test_a_notebook_as_it_is_handed_out_runs_and_attempts_nothing(chapter, tmp_path):
    path = tmp_path / NOTEBOOKS[chapter].name
    path.write_text(json.dumps(handed_out(chapter)))
    (one,) = grade([path])
    assert {each.verdict for each in one.graded} == {"not attempted"}
    assert one.points == 0 and one.most > 0
    faults = [fault for fault in one.faults if "NotImplementedError" not in fault]
    assert [fault for fault in faults if "NameError" not in fault] == []  # what a stub leaves out
