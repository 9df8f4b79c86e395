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


def test_any_other_digit_in_a_sentence_is_found_out():
    told = {said for path in NOTEBOOKS for said in sentences(path) if not re.match(r"\d+ goals: ", said)}
    changed = [said[:at] + digit + said[at + 1 :] for said in told for at, digit in _other_digits(said)]
    assert len(changed) > 500
    assert [sentence for sentence in changed if not _found_out(sentence)] == []


def _other_digits(said: str) -> list[tuple[int, str]]:
    """Where a digit stands that is no part of a name, and one that is five away."""
    names = "|".join(map(re.escape, RECORDS.devices()))
    hidden = re.sub(rf"{names}|\[.*?\]\(.*?\)|`.*?`", lambda found: " " * len(found[0]), said)
    return [(digit.start(), str((int(digit[0]) + 5) % 10)) for digit in re.finditer(r"\d", hidden)]


def _found_out(sentence: str) -> bool:
    try:
        return bool(faults(sentence, RECORDS))
    except (AssertionError, IndexError, KeyError, ValueError):  # it names what no record is about
        return True


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
