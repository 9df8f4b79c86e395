"""What a machine has recorded of a table, and what is shown of what isn't recorded."""

from types import SimpleNamespace

import pytest

from helpers.book import notebook, store
from helpers.book.table import Table, numbers_of, recorded
from helpers.book.values import Number

ORIGIN = {"status": "ok", "driver": "none", "torch": "2.13.0+cpu", "cuda": "none"}
ORIGIN |= {"date": "2026-01-02", "commit": "0123456789", "method": 1}
CPU, GPU = "cpu-test", "nvidia-test"


def sorting(size):
    """Sorts."""


SIZES = {"small": [{"size": 1}], "cpu": [{"size": 2}, {"size": 3}], "big-gpu": [{"size": 9}]}
SORTING, OTHER = (Table("chapter", name, sorting, SIZES, version=1) for name in ("sorting", "other"))


@pytest.fixture
def record(results):
    def write(folder: str, preset: str, size: int, table: str = "sorting", **origin) -> None:
        name = {CPU: "CPU Test", GPU: "NVIDIA Test"}[folder]
        row = {"size": size, "sort_ms": 3.0} | ORIGIN | {"gpu": name, "preset": preset} | origin
        store.replace(store.path(folder, "chapter", table), [row], ["size", "preset"])

    return write


def test_rows_are_those_of_the_machine_that_is_named_but_for_small_ones(record):
    record(CPU, "cpu", 2)
    record(CPU, "small", 1)
    record(GPU, "big-gpu", 9)
    assert recorded(SORTING, CPU).measured["size"].tolist() == [2]
    assert recorded(SORTING, GPU).measured["size"].tolist() == [9]
    assert not len(recorded(SORTING, "no-such").rows)


def test_rows_come_in_the_order_of_their_configurations_whenever_they_were_measured(record):
    record(CPU, "cpu", 3)
    record(CPU, "cpu", 2)
    assert recorded(SORTING, CPU).measured["size"].tolist() == [2, 3]


def test_a_caption_names_the_machine_and_counts_runs_and_rows_of_an_older_method(record):
    record(CPU, "cpu", 2, run="2026-01-02T10:00:00+00:00")
    assert recorded(SORTING, CPU).origin == "Machine: CPU Test."
    record(CPU, "cpu", 3, run="2026-01-02T11:00:00+00:00", method=0)
    assert recorded(SORTING, CPU).origin == "Machine: CPU Test. 1 rows by an older method. Rows of 2 runs."
    record(CPU, "cpu", 2, noisy="busy", run="2026-01-02T11:00:00+00:00")
    record(CPU, "cpu", 3, noisy="busy", run="2026-01-02T11:00:00+00:00")
    assert recorded(SORTING, CPU).origin == "Machine: CPU Test. †: 2 of 2 rows."
    record(CPU, "cpu", 2)  # an older row: its day and commit count
    record(CPU, "cpu", 3, commit="123")
    assert recorded(SORTING, CPU).runs == 2
    assert recorded(SORTING, GPU).origin == ""


@pytest.fixture
def times():
    """The least time of a table's rows, and how many rows there are of each table."""

    def declare(**tables):
        @numbers_of(**tables)
        def numbers(*rows) -> SimpleNamespace:
            return SimpleNamespace(least=Number(rows[0]["sort_ms"].min(), "ms"), places=[*map(len, rows)])

        return numbers

    return declare


def test_numbers_are_of_one_machine_and_need_some_tables_and_can_do_without_others(record, times):
    for table in ("sorting", "other"):
        record(CPU, "cpu", 2, table, sort_ms=8.0)
    record(GPU, "big-gpu", 9)
    both, beside = times(needs=[SORTING, OTHER]), times(needs=[SORTING], beside=[OTHER])
    assert both.on(CPU).least.value == 8 and both.on(CPU).places == [1, 1]
    assert not both.on(GPU).least.measured and "chapter/other" in both.on(GPU).least.missing
    assert beside.on(GPU).least.value == 3 and beside.on(GPU).places == [1, 0]
    assert beside.on(GPU).number("least").value == 3 and not both.on(GPU).number("a.name").measured


def test_a_table_has_numbers_of_its_own_by_machine_and_of_any_rows(record):
    table = Table("chapter", "sorting", sorting, SIZES, version=1)
    table.numbers()(lambda rows: SimpleNamespace(sort=Number(rows["sort_ms"].min(), "ms")))
    record(CPU, "cpu", 2, sort_ms=8.0)
    assert table.on(CPU).sort.value == 8 == table.of_rows(recorded(table, CPU).rows).sort.value
    assert not table.on(GPU).sort.measured


def test_what_nobody_measured_is_one_line_that_says_how_to(record, times, monkeypatch):
    rendered = []
    monkeypatch.setattr(notebook, "display", lambda what, metadata: rendered.append((what.data, metadata["helpers"])))
    record(CPU, "small", 1)
    notebook.when(times(needs=[SORTING]).on(CPU))(lambda numbers: rendered.append("ran"))
    ((text, metadata),) = rendered
    assert "dlspeed measure chapter/sorting" in text
    assert metadata == {"report": False}
