"""The answer as people and programs read it: what takes the time, what helped, what did not, and what is left."""

import json
import math
from pathlib import Path

import pytest

from helpers.cli import main
from helpers.findings.summary import MEASURED, Finding
from helpers.trying import search
from helpers.trying.answer import Result, Tried, markdown_of, text

FASTER = Tried("optimizer", "change", 0.2, 0.15, 0.25, "faster", "bitwise equal, 9 steps")
NONE = Tried("compile", "change", 0.01, -0.01, 0.02, "none above 2.4 %", "bitwise equal, 9 steps")
OTHER = Tried("autocast-bf16", "change", 0.3, 0.2, 0.4, "faster", "different: 40 %, 9 steps", same=False)
PROBE = Tried("no-output", "probe", 0.9, 0.88, 0.92, "faster", "another training")


def finding(name: str, share: float) -> Finding:
    return Finding(name, "observed", 1.0, share, f"train.py:{round(100 * share)}", "", f"mind the {name}", MEASURED)


def result(*tried: Tried, findings: tuple = ()) -> Result:
    lines = [{"where": f"train.py:{i}", "source": "x()", "activity": "computing", "share": 1 / 3} for i in range(3)]
    return Result("train.py", 10.0, 0.5, lines=lines, tried=list(tried), findings=findings, patch="--- a\n+++ b\n")


def test_shares_add_up_to_a_hundred():
    shares = [int(line.split("%")[0]) for line in text(result()).splitlines() if "train.py:" in line and "%" in line]
    assert len(shares) == 3 and sum(shares) == 100


def test_each_change_stands_in_one_section_of_text_and_json():
    answer = result(NONE, OTHER, FASTER, findings=(finding("unfused optimizer", 0.2),))
    parts = text(answer).split("\n\n")
    starts = [part.splitlines()[0] for part in parts[1:]]
    assert starts == [
        "what takes the time", "what was tried and helped", "--- a",
        "what was tried and does nothing here", "what was tried and is still open",
    ]  # fmt: skip
    assert "optimizer" in parts[2] and "excluded above 2.4 %" in parts[4] and "different" in parts[5]
    document = json.loads(answer.json())
    groups = ("helped", "nothing", "open")
    assert [[row["change"] for row in document[group]] for group in groups] == [
        ["optimizer"], ["compile"], ["autocast-bf16"],
    ]  # fmt: skip
    assert list(document)[:5] == ["command", "step_ms", "peak_gib", "pages_kept", "lines"]


def test_what_several_bring_together_stands_below_them():
    two = result(FASTER, Tried("allocator", "change", 0.1, 0.05, 0.15, "faster"))
    two.kept, two.together = ["optimizer"], FASTER
    assert "the patch makes optimizer alone" in text(two)
    two.kept, two.together = (
        ["optimizer", "allocator"],
        Tried("optimizer + allocator", "change", 0.28, 0.2, 0.3, "faster"),
    )
    assert "optimizer + allocator faster; 28% (20% to 30%) of the time goes" in text(two)


def test_using_names_every_key_of_the_document():
    using = (Path(__file__).parents[2] / "USING.md").read_text(encoding="utf-8")
    document = json.loads(result(PROBE, findings=(finding("drawing", 0.9),)).json())
    rows = document["lines"] + document["probes"] + document["yours"]
    assert all(f"`{name}`" in using for keys in (document, *rows) for name in keys)


def test_what_no_change_addresses_is_the_authors_with_a_probes_bound_where_there_is_one():
    findings = (finding("drawing", 0.8), finding("padding", 0.1), finding("unfused optimizer", 0.2))
    yours = result(PROBE, FASTER, findings=findings).yours
    assert [(each["finding"], each["most"], each["by"]) for each in yours] == [
        ("drawing", 0.9, "no-output"), ("padding", 0.1, "profile"),
    ]  # fmt: skip
    assert yours[0]["where"] == "train.py:80" and yours[0]["advice"] == "mind the drawing"
    unfused = result(findings=(finding("small operators", 0.6),))
    unfused.not_tried = [{"change": "compile", "reason": "the 60 s were spent", "applies": True}]
    assert "small operators: at most 60%, by the profile; compile not tried" in text(unfused)


@pytest.mark.parametrize(("gain", "listed"), [(0.9, True), (0.21, False)])
def test_a_change_that_helped_leaves_the_author_what_a_probe_shows_beyond_it(gain, listed):
    workers = Tried("loader-workers", "change", 0.2, 0.15, 0.25, "faster")
    same = Tried("same-batch", "probe", gain, gain - 0.01, gain + 0.01, "faster")
    answer = result(workers, same, findings=(finding("waiting for the loader", 0.9),))
    assert [each["gained"] for each in answer.yours] == ([0.2] if listed else [])
    assert ("at most 90%, tried by same-batch (89% to 91%); 20% by what helped" in text(answer)) == listed


def test_a_probe_that_brings_less_than_the_profile_promises_is_believed():
    nothing = Tried("no-collection", "probe", 0.01, -0.05, 0.07, "undecided, detects 15 %")
    (row,) = result(nothing, findings=(finding("garbage collection", 0.3),)).yours
    assert (row["most"], row["by"]) == (0.07, "no-collection")


def test_a_probe_that_no_finding_asked_for_is_told_too():
    assert "no-output: at most 90%, tried by no-output (88% to 92%)" in text(result(PROBE))


def beside(verdict: str, **columns) -> Result:
    return Result("train.py", tried=[Tried("edited.py", "edited", verdict=verdict, **columns)])


def test_an_edit_for_a_pull_request():
    interval = {"gain_share": -0.25, "low": -0.3, "high": -0.21}
    different = beside("slower", losses="different: 40 %, 9 steps", same=False, **interval)
    different.differs = {"threads": ["2", "1"]}
    assert markdown_of(different).split("\n\n") == [
        "### `edited.py` beside `train.py`: slower, losses differ",
        "A step takes 1.25 times as long (95 % interval: 1.21 to 1.3).",
        "Losses: different: 40 %, 9 steps.",
        "| what differs | before | beside |\n| --- | --- | --- |\n| `threads` | `2` | `1` |",
    ]
    assert markdown_of(beside("none above 2.4 %")) == "### `edited.py` beside `train.py`: no effect above 2.4 %"
    assert markdown_of(beside("failed", same=False, reason="<b>`x`</b>")).endswith(": failed\n\n``<b>`x`</b>``")


@pytest.mark.parametrize(
    ("verdict", "code"),
    [
        ("faster", 0),
        ("none above 2.4 %", 0),
        ("slower", 3),
        ("undecided, detects 15 %", 4),
        ("undecided", 4),
        ("failed", 1),
    ],
)
def test_the_exit_code_tells_the_verdict(verdict, code, monkeypatch, tmp_path, capsys):
    (tmp_path / "train.py").touch()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(search, "try_edited", lambda *arguments, **options: beside(verdict, reason="no data"))
    assert main(["try", "--markdown", "-", "--against", "train.py", "train.py"]) == code
    out, err = capsys.readouterr()
    assert out.startswith("### ") and err == ("dlspeed: no data\n" if code == 1 else "")


def test_a_change_that_failed_leaves_its_finding_to_the_user():
    failed = Tried("optimizer", "change", math.nan, math.nan, math.nan, "failed")
    slow = (finding("unfused optimizer", 0.2),)
    assert [row["finding"] for row in result(failed, findings=slow).yours] == ["unfused optimizer"]
    assert result(FASTER, findings=slow).yours == []
