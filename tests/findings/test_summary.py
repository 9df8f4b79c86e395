import io
import json
import re
import sys
from dataclasses import replace

from findings.made_up import LAUNCHES, diagnosis
from hypothesis import given
from hypothesis import strategies as st

from helpers.cli import main
from helpers.findings.summary import COLUMNS, WIDTH, change_first
from helpers.findings.trace import Note


@given(weights=st.lists(st.floats(0, 1), min_size=4, max_size=4).filter(any))
def test_bars_fill_the_width_together_whatever_is_rounded(weights):
    account = {f"part {i}": weight / sum(weights) for i, weight in enumerate(weights)}
    text = str(diagnosis(account=account, idle={}))
    assert text.count("█") == 60


def test_reasons_of_idle_time_are_drawn_under_it():
    text = str(diagnosis())
    assert re.findall(r"^ +(\w.*?) +([\d.]+)%", text, re.MULTILINE)[-3:] == [
        ("idle", "50.0"),
        ("inside an op", "40.0"),
        ("Python", "10.0"),
    ]
    assert text.count("▒") == 30


def test_lines_fit_in_100_columns_and_paths_stay_whole():
    path = f"/home/user/{'folder/' * 20}train.py:42"
    text = str(diagnosis(findings=(replace(LAUNCHES, advice="a word " * 100, where=f"{path} in step"),)))
    assert {len(line) > WIDTH for line in text.splitlines() if path not in line} == {False}
    assert path in text


def test_what_stdout_cannot_print_is_replaced(monkeypatch):
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(io.BytesIO(), "ascii"))
    text = str(diagnosis(notes=(Note("", "→ naïve …"),)))
    assert text.isascii() and "note: ? na?ve ?" in text


def test_control_characters_of_a_profile_do_not_reach_the_terminal():
    assert "\x1b" not in str(diagnosis(findings=(replace(LAUNCHES, where="\x1b[2Jtrain.py"),)))


def test_a_loop_that_has_only_options_is_told_that_nothing_is_wrong():
    option, fault = replace(LAUNCHES, option=True), replace(LAUNCHES, gain_share=0.1)
    assert change_first([option]).startswith(" Nothing wrong was found. What could be faster still: launch-bound loop")
    assert change_first([fault, option]).startswith(" Change first: ")
    told = diagnosis(findings=(fault, option))
    assert "2. option: launch-bound loop" in str(told) and [row["option"] for row in told.data()["findings"]] == [
        False,
        True,
    ]


def test_json_has_the_documented_keys_and_no_spans():
    data = json.loads(diagnosis().json())
    assert list(data) == ["verdict", "bound", "steps", "step_ms", "account", "idle", "findings", "notes"]
    assert [list(finding) for finding in data["findings"]] == [COLUMNS, COLUMNS]
    host = json.loads(diagnosis(account=None, idle={}, host={"operators": 1.0}).json())
    assert host["account"] is None and host["host"] == {"operators": 1.0}


def test_a_bad_profile_or_command_is_one_line(tmp_path, capsys):
    bad = tmp_path / "bad.json"
    bad.write_text("{}")
    for arguments, code, message in (
        ([bad], 1, "no trace events"),
        ([tmp_path / "missing.json"], 1, "No such file"),
        ([bad, "--html", bad], 2, "would be overwritten"),
    ):
        assert main(["diagnose", *map(str, arguments)]) == code
        out, err = capsys.readouterr()
        assert (out, err.count("\n")) == ("", 1)
        assert message in err
    assert bad.read_text() == "{}"
