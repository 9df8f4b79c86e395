import errno
import multiprocessing
import os

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from helpers.book import RecordError, store

ORIGIN = {
    "preset": "full", "gpu": "NVIDIA Test", "driver": "1.2", "torch": "2.13.0", "cuda": "13.0",
    "date": "2026-01-02", "commit": "abc", "method": 1,
}  # fmt: skip


def row(**values):
    return values | {"status": "ok"} | ORIGIN


@pytest.fixture
def file(tmp_path):
    return store.path("nvidia-test", "chapter", "table", tmp_path)


def test_rows_come_back_as_they_were_measured(file, tmp_path):
    store.replace(file, [row(size=1, time_ms=0.123456789, way="a, b"), row(size=2, time_ms=None, way='say "x"')])
    table = store.read("nvidia-test", "chapter", "table", tmp_path)
    assert table["size"].tolist() == [1, 2]
    assert table["time_ms"][0] == 0.123457
    assert table["time_ms"].isna().tolist() == [False, True]
    assert table["way"].tolist() == ["a, b", 'say "x"']
    assert table["method"].tolist() == ["1", "1"]


def test_rows_of_before_times_were_recorded_keep_their_checksums(file, tmp_path):
    store.replace(file, [row(size=1)])
    text = file.read_text().replace("seconds,", "").replace(",ok,,", ",ok,")  # as they were written then
    file.write_text(text)
    (old,) = store.read_rows(file)
    assert "seconds" not in store.read("nvidia-test", "chapter", "table", tmp_path)
    store.replace(file, [row(size=2, seconds=1.5)], ["size"])
    before, after = store.read_rows(file)
    assert (before["checksum"], before["seconds"], after["seconds"]) == (old["checksum"], "", "1.5")


def test_a_row_gives_way_to_a_new_one_about_the_same(file):
    store.replace(file, [row(size=1, time_ms=1.0), row(size=2, time_ms=2.0)], ["size"])
    store.replace(file, [row(size=1, time_ms=9.0)], ["size"])
    assert [(r["size"], r["time_ms"]) for r in store.read_rows(file)] == [("2", "2"), ("1", "9")]


def damage(file, change):
    store.replace(file, [row(size=1, time_ms=1.5), row(size=2, time_ms=2.5)])
    text = file.read_text()
    file.write_text(change(text))
    return file.read_bytes()


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda text: text[:-30], "line 3"),
        (lambda text: text.rstrip("\n"), "the last line is cut off"),
        (lambda text: text.replace("2.5", "2.4"), "line 3: its cells do not match its checksum"),
        (lambda text: text.replace("1,1.5,", "1,"), "line 2"),
        (lambda text: text.replace("checksum", "check"), "line 1: the header lacks checksum"),
        (lambda text: text + text.splitlines(keepends=True)[1], "line 4: the same row as line 2"),
        (lambda text: "\0\1garbage", "line 1"),
        (lambda text: text + '"' + "x" * 200_000 + "\n", "line 1: not a table"),
    ],
)
def test_a_damaged_file_is_named_with_its_row_and_never_overwritten(file, change, said):
    before = damage(file, change)
    with pytest.raises(RecordError) as error:
        store.read_rows(file)
    assert str(file) in str(error.value)
    assert said in str(error.value)
    with pytest.raises(RecordError):
        store.replace(file, [row(size=3)])
    assert file.read_bytes() == before


def test_a_byte_order_mark_is_read(file):
    store.replace(file, [row(size=1), row(size=2)])
    file.write_bytes(b"\xef\xbb\xbf" + file.read_bytes())
    assert [result["size"] for result in store.read_rows(file)] == ["1", "2"]


def test_equal_rows_are_written_once(file):
    store.replace(file, [row(size=1), row(size=1), row(size=2)])
    assert [result["size"] for result in store.read_rows(file)] == ["1", "2"]


def test_bytes_that_are_no_text_are_an_error_too(file):
    file.parent.mkdir(parents=True)
    file.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(RecordError, match="cannot be read"):
        store.read_rows(file)


def test_a_pipe_in_place_of_a_file_is_named_and_not_waited_for(file):
    os.makedirs(file.parent)
    os.mkfifo(file)
    with pytest.raises(RecordError, match=f"{file}: cannot be read .*not a regular file"):
        store.read_rows(file)


def test_a_full_disk_is_named_by_the_file(file, monkeypatch):
    monkeypatch.setattr(os, "fsync", lambda _: (_ for _ in ()).throw(OSError(errno.ENOSPC, "No space left on device")))
    with pytest.raises(OSError, match=f"No space left on device: '{file}'"):
        store.replace(file, [row(size=1)])
    assert not list(file.parent.iterdir())


def test_a_kill_while_writing_leaves_the_old_file(file, monkeypatch):
    store.replace(file, [row(size=1)])
    before = file.read_bytes()

    def die(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "replace", die)
    with pytest.raises(KeyboardInterrupt):
        store.replace(file, [row(size=2)])
    monkeypatch.undo()
    assert file.read_bytes() == before
    store.replace(file, [row(size=3)])
    assert [r["size"] for r in store.read_rows(file)] == ["1", "3"]


def _add_rows(file, start):
    for size in range(start, start + 20):
        store.replace(file, [row(size=size)], ["size"])


def test_two_processes_lose_none_of_each_others_rows(file):
    context = multiprocessing.get_context("fork")
    workers = [context.Process(target=_add_rows, args=(file, start)) for start in (0, 100)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert len(store.read_rows(file)) == 40


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=30, deadline=None)
@given(
    text=st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), max_size=30),
    number=st.floats(allow_nan=False, allow_infinity=False, width=32),
    count=st.integers(-(10**9), 10**9),
)
def test_any_cell_survives_a_round_trip(file, text, number, count):
    file.unlink(missing_ok=True)
    store.replace(file, [row(text=text, number=number, count=count)])
    (result,) = store.read_rows(file)
    assert result["text"] == " ".join(text.split())
    assert float(result["number"]) == pytest.approx(number, rel=1e-5)
    assert int(result["count"]) == count


def test_the_summary_says_what_was_recorded_on_each_machine(tmp_path):
    assert store.summary(tmp_path).empty
    for gpu in ("nvidia-b", "nvidia-a", "cpu-x"):
        file = store.path(gpu, "chapter", "table", tmp_path)
        store.replace(file, [row(size=1) | {"gpu": gpu}, row(size=2) | {"gpu": gpu, "date": "2026-03-01"}])
    table = store.summary(tmp_path)
    assert table["gpu"].tolist() == ["nvidia-a", "nvidia-b", "cpu-x"]
    assert table.iloc[0][["first_date", "last_date", "rows"]].tolist() == ["2026-01-02", "2026-03-01", 2]
    assert store.devices(tmp_path, cpu=True) == ["cpu-x"]
    store.path("nvidia-a", "chapter", "damaged", tmp_path).write_text("garbage")
    assert store.summary(tmp_path)["rows"].tolist() == [2, 2, 2]
