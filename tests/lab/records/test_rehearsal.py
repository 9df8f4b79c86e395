"""Every table is tried at its smallest sizes in processes beside each other, and each fault is a line."""

import importlib
from pathlib import Path

import pytest

from helpers import experiments
from helpers.commands import main
from helpers.lab.records import rehearsal
from helpers.lab.records.rehearsal import rehearse

TABLES = """
import os, time
from helpers.lab import Disagreement
from helpers.lab import experiment

@experiment(small=[{"size": 1}, {"size": 2}])
def right(size):
    return {"area": size}

@experiment(small=[{"size": 1}, {"size": 2}])
def differs(size):
    if size == 2:
        raise Disagreement("'fast' differs from 'plain'")
    return {"area": size}

@experiment(small=[{}])
def dies():
    os._exit(1)

@experiment(small=[{}])
def hangs():
    while True:
        time.sleep(60)
"""


@pytest.fixture
def tables(tmp_path, monkeypatch):
    (tmp_path / "cases").mkdir()
    (tmp_path / "cases" / "tables.py").write_text(TABLES)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(rehearsal.machine, "project_root", lambda: Path("/nowhere"))
    return importlib.import_module("cases.tables")


def test_each_fault_is_a_line_and_the_other_tables_go_on(tables):
    said = []
    faults = rehearse([tables.dies, tables.differs, tables.right], said.append)
    assert sorted(faults) == [
        "cases/dies: its process was killed, or crashed",
        "cases/differs: failed: 'fast' differs from 'plain'",
    ]
    assert len(said) == 3 and any(line.startswith("cases/right: right, ") for line in said)


def test_a_table_that_hangs_is_left_and_named(tables, monkeypatch):
    monkeypatch.setattr(rehearsal, "TABLE_S", 0.1)  # its process takes longer to start
    assert rehearse([tables.hangs], str) == ["cases/hangs: hangs: not done within 0 s"]


def test_the_command_exits_with_1_and_lists_the_faults(tables, monkeypatch, capsys):
    for chosen, code in (([tables.right], 0), ([tables.right, tables.differs], 1)):
        monkeypatch.setattr(experiments, "select", lambda _, chosen=chosen: chosen)
        assert main(["measure", "--check"]) == code
    out, err = capsys.readouterr()
    assert out.splitlines()[-1] == "cases/differs: failed: 'fast' differs from 'plain'"
    assert "1 faults in 2 tables" in err
