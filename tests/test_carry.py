"""What is carried to a machine without a network runs there: the project as it was committed, wheels and text."""

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from helpers import carry, doctor
from helpers.cli import main
from helpers.lab import files

WHEEL = "carried_case-1.0-py3-none-any.whl"
INFO = "carried_case-1.0.dist-info"


@pytest.fixture
def wheels(tmp_path):
    """A folder with a package of our own, which measures nothing."""
    folder = tmp_path / "own"
    folder.mkdir()
    with zipfile.ZipFile(folder / WHEEL, "w") as wheel:
        wheel.writestr("carried_case.py", "VALUE = 7\n")
        wheel.writestr(f"{INFO}/METADATA", "Metadata-Version: 2.1\nName: carried-case\nVersion: 1.0\n")
        wheel.writestr(f"{INFO}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr(f"{INFO}/RECORD", "")
    return folder


@pytest.fixture
def text(tmp_path, monkeypatch):
    (tmp_path / "wikitext-103").mkdir()
    (tmp_path / "wikitext-103" / "wiki.valid.tokens").write_text("a line of text\n")
    monkeypatch.setenv("HELPERS_WIKITEXT", str(tmp_path / "wikitext-103"))


@pytest.mark.long
def test_the_folder_measures_elsewhere_and_brings_its_records(tmp_path, wheels, text, monkeypatch, capsys):
    monkeypatch.setattr(carry, "requirements", lambda: [])
    assert main(["carry", str(tmp_path / "gpu"), "--wheels", str(wheels)]) == 0
    assert "text: WikiText. There: bash go check" in capsys.readouterr().out
    go = tmp_path / "gpu" / "go"
    go.write_text(go.read_text().replace("measure --seconds", "measure amp/exponents --preset small --seconds"))
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "python3").write_text(f'#!/bin/sh\nexec {sys.executable} "$@"\n')
    (tmp_path / "bin" / "python3").chmod(0o755)
    there = {"PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}", "OUT": str(tmp_path), "HELPERS_WIKITEXT": ""}
    done = subprocess.run(["bash", go, "90"], env=os.environ | there, capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 0 and "1 configurations measured" in done.stdout, done.stderr
    listed = subprocess.run(["tar", "tzf", tmp_path / "results.tgz"], capture_output=True, text=True).stdout
    assert "/amp/exponents.csv" in listed


def test_what_the_machine_has_is_not_carried_and_needs_are(tmp_path, monkeypatch):
    asked = []

    def pip(command, **_):
        asked.append(command[-1])
        if command[-1] == "absent" or "wheel" in command:
            return subprocess.CompletedProcess(command, 1)
        with zipfile.ZipFile(Path(command[command.index("-d") + 1]) / f"{command[-1]}-1-py3-none-any.whl", "w") as file:
            needs = "Requires-Dist: deep>=2\nRequires-Dist: there\nRequires-Dist: x; extra == 'dev'\n"
            file.writestr("a.dist-info/METADATA", needs if command[-1] == "liger" else "")
        return subprocess.CompletedProcess(command, 0)

    monkeypatch.setattr(carry.subprocess, "run", pip)
    present = {"there"}
    assert carry._download(["liger", "absent"], tmp_path, "3.12", present) == ["absent"]
    assert asked == ["liger", "absent", "absent", "deep>=2"]


def test_a_folder_that_holds_something_is_refused(tmp_path, capsys):
    (tmp_path / "file").touch()
    assert main(["carry", str(tmp_path)]) == 2
    assert "is there already" in capsys.readouterr().err


def test_wanted_lists_what_pip_should_install(monkeypatch, capsys):
    monkeypatch.setattr(doctor, "installed", lambda name: None if name in ("torchao", "webdataset") else "1.0")
    assert main(["doctor", "--wanted"]) == 0
    assert capsys.readouterr().out.split() == ["torchao", "webdataset==1.0.2"]


def test_the_tables_requirements_are_the_versions_that_the_tests_run_with():
    pinned = {line.split()[0] for line in (files.project_root() / "requirements.txt").read_text().splitlines() if line}
    assert {line for line in doctor.requirements() if "==" in line} <= pinned
