"""Which machine's records a table shows, and what it shows of what isn't recorded."""

import dataclasses
from types import SimpleNamespace

import pandas as pd
import pytest

from helpers.lab.machine import device_name
from helpers.lab.records import runner, store
from helpers.lab.records.experiment import Experiment
from helpers.lab.records.values import Number, lacking
from helpers.lab.report import notebook
from helpers.lab.report.notebook import main_machine, results, table, with_cpu

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
        store.replace(store.path(folder, "chapter", table), [row], ["size", "preset"])

    return write


def test_a_table_shows_one_machine_a_gpus_before_a_cpus(record):
    record("CPU Test", "cpu", 2)
    assert results(SORTING).measured["gpu"].tolist() == ["CPU Test"]
    record("NVIDIA Test", "big-gpu", 9)
    assert results(SORTING).measured["gpu"].tolist() == ["NVIDIA Test"]


def test_rows_come_in_the_order_of_their_configurations_whenever_they_were_measured(record):
    record("CPU Test", "cpu", 3)
    record("CPU Test", "cpu", 2)
    assert results(SORTING).measured["size"].tolist() == [2, 3]


def test_of_several_gpus_that_of_the_title_page_is_shown(record):
    record("NVIDIA A", "big-gpu", 9)
    record("NVIDIA B", "big-gpu", 9)
    record("NVIDIA B", "big-gpu", 9, table="other")
    assert main_machine() == "NVIDIA B"
    assert results(SORTING).measured["gpu"].tolist() == ["NVIDIA B"]


def test_rows_of_this_method_are_shown_before_older_ones_of_the_title_pages_machine(record):
    record("CPU A", "cpu", 2, method=0)
    record("CPU A", "cpu", 3, table="other")
    record("CPU B", "cpu", 2)
    assert main_machine() == "CPU A"
    assert results(SORTING).measured["gpu"].tolist() == ["CPU B"]


def test_the_title_page_names_the_last_measured_machine_that_has_half_of_the_tables(record):
    record("CPU A", "cpu", 2)
    record("CPU A", "cpu", 2, table="other")
    record("CPU B", "cpu", 2, date="2026-02-01")
    assert main_machine() == "CPU B"
    record("CPU A", "cpu", 2, table="third")
    assert main_machine() == "CPU A"


def test_a_caption_names_a_machine_that_is_not_the_title_pages_and_counts_rows_of_an_older_method(record):
    record("CPU Test", "cpu", 2)
    assert results(SORTING).origin == ""
    record("NVIDIA Test", "big-gpu", 9, table="other")
    record("CPU Test", "cpu", 3, method=0)
    assert results(SORTING).origin == "On the CPU. 1 rows by an older method."
    record("CPU Other", "cpu", 2, table="other")
    assert results(SORTING).origin == "Measured on CPU Test. 1 rows by an older method."


def test_a_caption_says_of_how_many_runs_its_rows_are(record):
    record("CPU Test", "cpu", 2, run="2026-01-02T10:00:00+00:00")
    record("CPU Test", "cpu", 3, run="2026-01-02T10:00:00+00:00")
    assert results(SORTING).origin == "" and results(SORTING).runs == 1
    record("CPU Test", "cpu", 3, run="2026-01-02T11:00:00+00:00")
    assert results(SORTING).origin == "Rows of 2 runs."
    record("CPU Test", "cpu", 2)  # an older row: its day and commit count
    record("CPU Test", "cpu", 3, commit="123")
    assert results(SORTING).runs == 2


def test_what_nobody_measured_is_one_line_that_says_how_to_and_no_table(record, monkeypatch):
    rendered = []
    monkeypatch.setattr(notebook, "display", lambda what, metadata: rendered.append((what.data, metadata["helpers"])))
    record("CPU Test", "small", 1)
    waiting = results(SORTING)
    notebook.when(waiting)(lambda waiting: table(waiting.rows, "a caption"))
    ((text, metadata),) = rendered
    assert "dlspeed measure chapter/sorting" in text
    assert metadata == {"report": False, "waiting": "chapter/sorting", "about": "Sorts."}


CALLS = []


def doubling(size):
    """Doubles."""
    CALLS.append(size)
    return {"double": 2 * size}


DOUBLING = Experiment("chapter", "doubling", doubling, SIZES, version=1)


@pytest.fixture
def lines(monkeypatch):
    """What `results` shows in a cell, none of it for the report."""
    texts = []

    def display(what, metadata):
        assert metadata["helpers"]["report"] is False
        texts.append(what.data)

    monkeypatch.setattr(notebook, "display", display)
    monkeypatch.setattr(runner, "ATTEMPTS", 1)
    CALLS.clear()
    return texts


def test_with_seconds_to_spend_what_is_missing_is_measured_and_said_before(results, lines):
    result = notebook.results(DOUBLING, preset="cpu", seconds=90)
    assert result.measured["double"].tolist() == [4, 6]
    assert lines == [
        f"*Measuring chapter/doubling: 2 of 2 configurations (cpu) on {device_name()}; expected minutes: unknown; "
        "ends after 1.5.*"
    ]
    notebook.results(DOUBLING, preset="cpu", seconds=90)
    assert CALLS == [2, 3] and len(lines) == 1


def test_small_sizes_are_shown_where_they_are_asked_for(results, lines):
    assert notebook.results(DOUBLING, preset="small", seconds=90).measured["double"].tolist() == [2]
    assert notebook.results(DOUBLING, preset="small").measured["double"].tolist() == [2]
    assert not len(notebook.results(DOUBLING).measured)


@pytest.mark.parametrize("forbidden", [False, True])
def test_on_a_gpu_nothing_is_measured_without_seconds_or_where_it_is_forbidden(
    forbidden, results, lines, made_up_gpu, monkeypatch
):
    made_up_gpu((7, 5), gib=15)
    if forbidden:
        monkeypatch.setenv("HELPERS_LIVE", "no")
    assert not len(notebook.results(DOUBLING, seconds=90 if forbidden else None).rows)
    assert CALLS == [] == lines


def test_with_seconds_to_spend_this_machines_records_are_shown(record, lines):
    record("NVIDIA Test", "big-gpu", 9, table="doubling")
    assert notebook.results(DOUBLING).measured["gpu"].tolist() == ["NVIDIA Test"]
    assert set(notebook.results(DOUBLING, preset="cpu", seconds=90).measured["gpu"]) == {device_name()}


@pytest.fixture
def both(record):
    """A GPU that has one table of two, and a CPU that has both."""
    for name in ("sorting", "other"):
        record("CPU Test", "cpu", 2, name, sort_ms=8.0)
    record("NVIDIA Test", "big-gpu", 9)
    return SORTING, dataclasses.replace(SORTING, table="other")


def times(*tables) -> SimpleNamespace:
    return SimpleNamespace(sort=Number(tables[0]["sort_ms"].iloc[0], "ms"), places=[*map(len, tables)])


def test_numbers_of_one_name_are_of_one_machine(both):
    sorting, other = map(results, both)
    assert sorting.named(times).sort.value == 3 and other.named(times).sort.value == 8
    together = sorting.named(times, other)
    assert together.sort.value == 8 and together.origin == "On the CPU."  # only the CPU has both
    alone = sorting.named(times, beside=(other,))
    assert alone.sort.value == 3 and alone.places == [1, 0]


def test_where_a_gpu_is_shown_the_cpus_number_stands_beside(both):
    sorting, other = map(results, both)
    assert sorting.named(times).on_cpu.sort.value == 8
    assert not other.named(times).on_cpu.sort.measured  # it is the CPU's already
    assert not sorting.named(times).on_gpu.measured  # it is the GPU's already
    frame = pd.DataFrame({"rung": ["a", "b"], "speedup": [2.0, 3.0]})
    assert with_cpu(frame, frame.iloc[1:], "speedup", "rung")["speedup on the CPU"].dropna().to_dict() == {1: 3.0}
    assert with_cpu(frame, lacking("a table"), "speedup", "rung") is frame


def test_where_a_cpu_is_shown_as_it_has_more_rows_the_gpus_number_stands_beside(record):
    presets = SIZES | {"big-gpu": [{"size": size} for size in (7, 8, 9)]}
    record("NVIDIA Test", "big-gpu", 9)
    record("CPU Test", "cpu", 2, sort_ms=8.0)
    named = results(dataclasses.replace(SORTING, presets=presets)).named(times)
    assert named.sort.value == 8 and named.on_gpu.sort.value == 3
