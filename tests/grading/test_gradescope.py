"""What Gradescope is given works in its folders, and says what its specification asks for."""

import json
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
OF_ALL = {"score": float, "output": str, "visibility": str, "tests": list}
OF_A_TEST = {"name": str, "number": str, "score": float, "max_score": float, "status": str, "output": str}


def autograder(folder: Path) -> Path:
    """Its folders as Gradescope lays them out, from the zip that is uploaded; with this Python in its environment."""
    files = [f"--add-file={ROOT / 'data' / 'gradescope' / name}" for name in ("setup.sh", "run_autograder")]
    command = ["git", "archive", "-o", f"{folder / 'a.zip'}", *files, "--prefix=course/", "HEAD"]
    subprocess.run(command, cwd=ROOT, check=True)
    place = folder / "autograder"
    for name in ("source", "submission", "results", "venv/bin"):
        (place / name).mkdir(parents=True)
    with zipfile.ZipFile(folder / "a.zip") as archive:
        archive.extractall(place / "source")
    shutil.copy(place / "source" / "run_autograder", place)
    (place / "run_autograder").chmod(0o755)
    installed = place / "venv" / "bin" / "dlspeed"
    installed.write_text(f'#!/bin/sh\ncd {place / "source" / "course"} && exec {sys.executable} -m helpers "$@"\n')
    installed.chmod(0o755)
    return place


def graded(place: Path, **files: str) -> dict:
    for name, text in files.items():
        (place / "submission" / name.replace("_", ".")).write_text(text)
    subprocess.run([place / "run_autograder"], cwd=place, check=True, capture_output=True)
    return json.loads((place / "results" / "results.json").read_text())


@pytest.mark.long
def test_the_uploaded_zip_grades_in_gradescopes_folders(tmp_path):
    place = autograder(tmp_path)
    given = graded(place, readme_md="Hello.")
    assert (given["score"], given["tests"], given["output"]) == (0, [], "no exercise was handed in")
    scores = "def first_fit(lengths, capacity):\n    return [[i] for i in range(len(lengths))]\n"
    given = graded(place, a_py=f"1 / 0\n{scores}packs_saved = 0\n", b_py="packs_saved = 7")
    assert {name: type(value) for name, value in given.items()} == OF_ALL
    tests = {test["name"]: test for test in given["tests"]}
    for test in tests.values():
        assert set(test) == set(OF_A_TEST) and all(isinstance(test[n], (kind, int)) for n, kind in OF_A_TEST.items())
        assert 0 <= test["score"] <= test["max_score"] and test["status"] in ("passed", "failed")
    assert given["visibility"] in ("hidden", "after_due_date", "after_published", "visible")
    assert tests["packs_saved"]["score"] == 1 and 0 < tests["first_fit"]["score"] < 4
    assert given["score"] == round(sum(test["score"] for test in tests.values()), 2)
    assert "a.py: line 1: ZeroDivisionError" in given["output"] and "fails: fewer packs" in tests["first_fit"]["output"]
