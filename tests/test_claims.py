"""Every number in the sentences of the report, against the records."""

import re
from collections import Counter
from pathlib import Path

import nbformat
import pytest
from claims import Records, faults, sentences

ROOT = Path(__file__).parents[1]
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
RECORDS = Records(ROOT / "data" / "results")


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_the_sentences_say_what_the_records_say(path):
    assert [fault for sentence in sentences(path) for fault in faults(sentence, RECORDS)] == []


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_sentence_with_another_number_is_found_out(path):
    for sentence in sentences(path):
        for gain in re.finditer(r"\d(?=\d?(?:×| points| ms a step at first))", sentence):
            other = str((int(gain[0]) + 5) % 10)
            assert faults(sentence[: gain.start()] + other + sentence[gain.end() :], RECORDS), sentence


def test_the_goals_are_counted_as_the_table_has_them():
    cells = nbformat.read(ROOT / "notebooks" / "00_summary.ipynb", as_version=4).cells
    (goals,) = [cell for cell in cells if cell.cell_type == "code" and "against_records()" in cell.source]
    table = next(o.data["text/html"] for o in goals.outputs if "text/html" in o.get("data", {}))
    said = next(o.data["text/markdown"] for o in goals.outputs if "text/markdown" in o.get("data", {}))
    verdicts = re.findall(r">(not measured|reached|missed)</td>", table)
    assert (
        said
        == f"{len(verdicts)} goals: " + "; ".join(f"{n} {name}" for name, n in Counter(verdicts).most_common()) + "."
    )
