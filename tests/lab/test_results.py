"""Which machine's records a table shows, and what it shows of what isn't recorded."""

import pytest

from helpers.lab import notebook, records
from helpers.lab.experiment import Experiment
from helpers.lab.notebook import main_machine, results, table

ORIGIN = {"status": "ok", "driver": "none", "torch": "2.13.0+cpu", "cuda": "none"}
ORIGIN |= {"date": "2026-01-02", "commit": "0123456789", "method": 1}


def sorting(size):
    """Sorts."""


SIZES = {"small": [{"size": 1}], "cpu": [{"size": 2}, {"size": 3}], "big-gpu": [{"size": 9}]}
SORTING = Experiment("chapter", "sorting", sorting, SIZES, version=1)


@pytest.fixture
def record(results):
    def write(name: str, preset: str, size: int, table: str = "sorting", **origin) -> None:
        row = {"size": size, "sort_ms": 3.0} | ORIGIN | {"gpu": name, "preset": preset} | origin
        folder = name.lower().replace(" ", "-")
        records.replace(records.path(folder, "chapter", table), [row], ["size", "preset"])

    return write


def test_a_table_shows_one_machine_a_gpus_before_a_cpus(record):
    record("CPU Test", "cpu", 2)
    assert results(SORTING).measured["gpu"].tolist() == ["CPU Test"]
    record("NVIDIA Test", "big-gpu", 9)
    assert results(SORTING).measured["gpu"].tolist() == ["NVIDIA Test"]


def test_of_several_gpus_that_of_the_title_page_is_shown(record):
    record("NVIDIA A", "big-gpu", 9)
    record("NVIDIA B", "big-gpu", 9)
    record("NVIDIA B", "big-gpu", 9, table="other")
    assert main_machine() == "NVIDIA B"
    assert results(SORTING).measured["gpu"].tolist() == ["NVIDIA B"]


def test_a_caption_names_the_machine_only_where_it_is_another_than_the_title_pages(record):
    record("CPU Test", "cpu", 2)
    assert results(SORTING).origin == ""
    record("NVIDIA Test", "big-gpu", 9, table="other")
    assert results(SORTING).origin == "Measured on CPU Test."


def test_rows_of_an_older_method_are_counted(record):
    record("CPU Test", "cpu", 2, method=0)
    assert results(SORTING).origin == "1 rows by an older method."


def test_what_the_machines_class_should_have_and_lacks_is_a_row_that_says_so(record):
    record("CPU Test", "cpu", 3)
    shown = results(SORTING).with_missing
    assert shown["size"].tolist() == [2, 3]
    assert shown["status"].tolist() == ["not measured", "ok"]


def test_what_nobody_measured_is_one_line_that_says_how_to_and_no_table(record, monkeypatch):
    shown = []
    monkeypatch.setattr(notebook, "display", lambda what, metadata: shown.append((what.data, metadata["helpers"])))
    record("CPU Test", "small", 1)
    waiting = results(SORTING)
    table(waiting.with_missing, "a caption")
    ((text, metadata),) = shown
    assert "python -m helpers measure chapter/sorting" in text
    assert metadata == {"report": False, "waiting": "chapter/sorting", "about": "Sorts."}
