"""`dlspeed grade` as a student and a teacher type it."""

import csv
import json

import pytest

from helpers.checks.numbers import questions
from helpers.cli import main
from helpers.grading.exercises import EXERCISES


def test_a_file_is_told_by_exercise_with_a_hint(tmp_path, capsys):
    path = tmp_path / "solution.py"
    path.write_text("idle_ms = 128\nfind_bytes = 2 * 10**6\n")
    assert main(["grade", str(path)]) == 1
    out = capsys.readouterr().out.splitlines()
    assert "MyTarShard          not handed in   0 of 4" in out
    assert "find_bytes          passed          1 of 1" in out
    place = out.index("idle_ms             failed          0 of 1")
    assert "128 is wrong: there are two workers" in out[place + 1]
    assert out[place + 2].startswith("  hint: ") and "64" not in out[place + 2]
    assert out[-1] == "solution.py: 1 of 11 points"


def test_a_folder_is_a_table(tmp_path, capsys):
    (tmp_path / "a.py").write_text("grown = 100")
    (tmp_path / "b.py").write_text("grown = 99 +\n")
    (tmp_path / "c.ipynb").write_text("no notebook")
    assert main(["grade", str(tmp_path), "--chapter", "3"]) == 0
    head, a, b, c = capsys.readouterr().out.splitlines()
    assert head.split() == ["file", "3", "points", "failed"]
    assert a.split() == ["a.py", "1", "1"]
    assert b.split()[:3] == ["b.py", "0", "0"] and "invalid syntax" in b
    assert c.split()[:3] == ["c.ipynb", "0", "0"] and "no notebook" in c


@pytest.mark.long
def test_json_is_for_a_grade_book(tmp_path, capsys):
    (tmp_path / "a.py").write_text("grown = 100")
    assert main(["grade", str(tmp_path / "a.py"), "--json"]) == 1
    row = json.loads(capsys.readouterr().out)
    most = sum(each.points for each in EXERCISES.values() if each.chapter == 3)
    assert (row["file"], row["points"], row["of"], row["faults"]) == ("a.py", 1, most, [])
    (grown,) = (each for each in row["exercises"] if each["exercise"] == "grown")
    facts = {"chapter": 3, "exercise": "grown", "verdict": "passed", "points": 1, "of": 1, "failures": [], "hint": ""}
    assert {name: grown[name] for name in facts} == facts
    assert grown["parts"] == [{"part": questions()[3]["grown"], "points": 1, "of": 1}]


@pytest.mark.long
def test_a_csv_has_a_row_for_each_student_and_exercise(tmp_path, capsys):
    for student, product in (("ann", 4 / 3), ("bob", 2)):
        (tmp_path / f"{student}.py").write_text(f"product_ratio = {product}")
    files = [str(tmp_path / "ann.py"), str(tmp_path / "bob.py")]
    assert main(["grade", *files, "--csv", str(tmp_path / "grades.csv")]) == 0
    rows = list(csv.DictReader((tmp_path / "grades.csv").open()))
    assert list(rows[0]) == ["student", "exercise", "points", "of", "seconds", "message"]
    ann, bob = (row for row in rows if row["exercise"] == "product_ratio")
    assert (ann["student"], ann["points"], ann["of"], ann["message"]) == ("ann", "1", "1", "passed")
    assert (bob["student"], bob["points"], bob["of"]) == ("bob", "0", "1") and "2 is wrong" in bob["message"]
    assert "not limited on this machine: " in capsys.readouterr().err


def test_a_file_without_an_exercise_is_one_line(tmp_path, capsys):
    (tmp_path / "a.py").write_text("x = 1")
    assert main(["grade", str(tmp_path / "a.py")]) == 2
    assert capsys.readouterr().err == f"dlspeed: no exercise is in {tmp_path / 'a.py'}\n"
    assert main(["grade", str(tmp_path / "b.py")]) == 1
