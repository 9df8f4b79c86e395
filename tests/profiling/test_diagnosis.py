import io
import json
import re
import sys
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from profiling.made_up import LAUNCHES, REDUCTIONS, diagnosis

from helpers.__main__ import main
from helpers.profiling.comparison import compare
from helpers.profiling.diagnosis import COLUMNS, WIDTH
from helpers.profiling.trace import Note

words = st.text(st.characters(codec="utf-8", exclude_characters="/", exclude_categories=["Z", "C"]), min_size=1)


@given(weights=st.lists(st.floats(0, 1), min_size=4, max_size=4).filter(any), reasons=st.lists(st.floats(0, 1)))
def test_percentages_and_bars_add_up_to_the_whole_whatever_is_rounded(weights, reasons):
    account = dict(
        zip(("compute", "communication", "copies", "idle"), (w / sum(weights) for w in weights), strict=True)
    )
    scale = account["idle"] / max(sum(reasons), 1e-300)
    idle = {f"reason {i}": reason * scale for i, reason in enumerate(reasons)}
    text = str(diagnosis(account=account, idle=idle))
    percentages = {name: float(share) for name, share in re.findall(r"^  (\w+) +([\d.]+)%", text, re.MULTILINE)}
    parts = [float(share) for share in re.findall(r"^    \S.*? +([\d.]+)%", text, re.MULTILINE)]
    assert list(percentages) == list(account)
    assert sum(percentages.values()) == pytest.approx(100)
    assert text.count("█") == 60
    assert not parts or sum(parts) == pytest.approx(percentages["idle"])


@given(advice=st.lists(words), where=st.lists(words, max_size=40).map("/".join))
def test_lines_fit_in_100_columns_and_no_word_is_broken(advice, where):
    text = str(diagnosis(findings=(replace(LAUNCHES, advice=" ".join(advice), where=where),)))
    lines = text.splitlines()
    assert max(map(len, lines)) <= WIDTH
    assert {word for word in advice if len(word) < 80} <= {word for line in lines for word in line.split()}


def test_a_long_path_keeps_its_end():
    where = f"/home/user/{'folder/' * 20}train.py:42 in step"
    (line,) = re.findall(r"where +(.*)", str(diagnosis(findings=(replace(LAUNCHES, where=where),))))
    assert re.fullmatch(r"…/(folder/)+train.py:42 in step", line)


def test_what_stdout_cannot_print_is_replaced(monkeypatch):
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(io.BytesIO(), "ascii"))
    print(diagnosis(notes=(Note("", "→ naïve …"),)))
    text = str(diagnosis(notes=(Note("", "→ naïve …"),)))
    assert text.isascii()
    assert "#" * 30 in text
    assert "note: > na?ve ~" in text


def test_control_characters_of_a_profile_do_not_reach_the_terminal():
    assert "\x1b" not in str(diagnosis(findings=(replace(LAUNCHES, where="\x1b[2Jtrain.py"),)))


def test_json_has_the_documented_keys_and_no_spans():
    data = json.loads(diagnosis().json())
    assert list(data) == ["verdict", "bound", "steps", "step_ms", "account", "idle", "findings", "notes"]
    assert [list(finding) for finding in data["findings"]] == [COLUMNS, COLUMNS]
    host = json.loads(diagnosis(account=None, idle={}, host={"operators": 1.0}).json())
    assert host["account"] is None and host["host"] == {"operators": 1.0}


FASTER = diagnosis(
    step_ms=65.0,
    account={"compute": 0.5, "communication": 0.2, "copies": 0.1, "idle": 0.2},
    findings=(REDUCTIONS,),
)


def test_a_comparison_says_what_shrank_what_is_gone_and_what_came_of_the_promise():
    comparison = compare(diagnosis(), FASTER)
    assert comparison.parts["idle"] == pytest.approx((50, 13))
    assert [sum(ms) for ms in zip(*comparison.parts.values(), strict=True)] == pytest.approx([100, 65])
    assert (comparison.gone, comparison.left, comparison.new) == ([LAUNCHES], [REDUCTIONS], [])
    assert (comparison.promised_ms, comparison.gained_ms) == (40, 35)
    assert comparison.verdict == (
        "65 ms a step instead of 100 ms: 35 ms (35%) less. Idle shrank by 37 ms. "
        'Gone: "launch-bound loop", which promised up to 40 ms a step; 35 ms came (88%).'
    )
    assert re.search(r"^  idle +50\.0 +13\.0 +-37\.0$", str(comparison), re.MULTILINE)
    assert json.loads(comparison.json())["parts_ms"]["idle"] == {"before": 50.0, "after": 13.0}


def test_a_finding_beyond_the_first_five_is_not_gone():
    comparison = compare(diagnosis(), diagnosis(findings=(REDUCTIONS,), further=(LAUNCHES,)))
    assert (comparison.gone, comparison.left) == ([], [REDUCTIONS, LAUNCHES])


def test_promises_in_one_part_end_at_its_length():
    before = diagnosis(findings=(LAUNCHES, replace(LAUNCHES, finding="small batches")))
    assert compare(before, replace(FASTER, findings=())).promised_ms == 50


def test_without_a_gain_a_comparison_says_so():
    slower = diagnosis(step_ms=101.0, findings=())
    message = compare(diagnosis(), slower).verdict
    assert "no difference" in message
    assert "nothing came" in message
    assert "No finding is gone" in compare(diagnosis(), diagnosis()).verdict


def test_profiles_of_a_gpu_and_of_a_cpu_are_not_compared():
    with pytest.raises(ValueError, match="one profile has device events"):
        compare(diagnosis(), diagnosis(account=None, host={"operators": 1.0}))


def test_a_bad_profile_or_command_is_one_line(tmp_path, capsys):
    bad = tmp_path / "bad.json"
    bad.write_text("{}")
    for arguments, code, message in (
        ([bad], 1, "no trace events"),
        ([tmp_path / "missing.json"], 1, "No such file"),
        ([bad, bad, "--html", tmp_path / "new.html"], 2, "one profile"),
        ([bad, "--html", bad], 2, "would be overwritten"),
        ([bad, "--html", tmp_path], 2, "is a folder"),
    ):
        assert main(["diagnose", *map(str, arguments)]) == code
        out, err = capsys.readouterr()
        assert (out, err.count("\n")) == ("", 1)
        assert message in err
    assert bad.read_text() == "{}"
