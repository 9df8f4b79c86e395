"""Every table is tried at its smallest sizes in processes beside each other, and each fault is a line."""

import pytest
from cases import faulty_tables as tables

from helpers import chapters
from helpers.book import rehearsal
from helpers.book.rehearsal import rehearse
from helpers.cli import main


def test_each_fault_is_a_line_and_the_other_tables_go_on():
    said = []
    faults = rehearse([tables.dies, tables.differs, tables.right], said.append)
    assert sorted(faults) == [
        "cases/dies: its process was killed, or crashed",
        "cases/differs: failed: 'fast' differs from 'plain'",
    ]
    assert len(said) == 3 and any(line.startswith("cases/right: right, ") for line in said)


def test_a_table_that_hangs_is_left_and_named(monkeypatch):
    monkeypatch.setattr(rehearsal, "TABLE_S", 0.1)  # its process takes longer to start
    assert rehearse([tables.hangs], str) == ["cases/hangs: hangs: not done within 0 s"]


@pytest.mark.long
def test_the_command_exits_with_1_and_lists_the_faults(monkeypatch, capsys):
    for chosen, code in (([], 0), ([tables.differs], 1)):
        monkeypatch.setattr(chapters, "select", lambda _, chosen=chosen: chosen)
        assert main(["measure", "--check"]) == code
    out, err = capsys.readouterr()
    assert out.splitlines()[-1] == "cases/differs: failed: 'fast' differs from 'plain'"
    assert "1 faults in 1 tables" in err
