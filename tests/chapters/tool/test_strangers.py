"""Strangers' scripts: what was written down of each holds of the file, and how answers are counted."""

import pandas as pd
import pytest

from helpers.chapters import tool
from helpers.chapters.tool.strangers import LISTED, STRANGERS


def test_each_script_is_listed_and_its_lines_are_of_code():
    assert {entry["script"] for entry in LISTED} == {path.name for path in STRANGERS.glob("*.py")}
    for entry in LISTED:
        source = (STRANGERS / entry["script"]).read_text().splitlines()
        assert all(source[line - 1].strip() for line in entry["lines"]), entry["script"]
        assert bool(entry["lines"]) == ("cause" in entry) == entry["script"].startswith("faulty")


def row(script: str, share: float | None, place: float | None = None) -> dict:
    return {"script": script, "faulty": script.startswith("faulty"), "answer": "", "share": share, "place": place}


def test_first_answers_are_counted_of_faulty_scripts_and_alarms_of_five_percent_of_healthy_ones():
    first, second, missed = (row(f"faulty_{at}", 0.4, place) for at, place in enumerate((1, 2, None)))
    quiet = [row("healthy_a", None), row("healthy_b", 0.04)]
    numbers = tool.strangers.of_rows(pd.DataFrame([first, second, missed, *quiet, row("healthy_c", 0.21)]))
    assert numbers.first.value == pytest.approx(1 / 3)
    assert numbers.alarms.value == pytest.approx(1 / 3) and numbers.alarmed == "c 21%"
