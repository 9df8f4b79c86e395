import mmap
import os
import tempfile
from pathlib import Path

import pytest

from helpers.experiments.pipelines import format_speed
from helpers.experiments.pipelines.format_speed import BY_INDEX, cached_pages, evict, flush, measure_format, prepared
from helpers.lab import Disagreement
from helpers.lab.machine import missing_because
from helpers.pipelines.formats import FORMATS

SMALL = {"count": 40, "repeats": 2}
HERE = [name for name, module in FORMATS.items() if not missing_because(*module.NEEDS)]


@pytest.mark.parametrize("name", HERE)
@pytest.mark.parametrize("kind", ["image", "tokens"])
def test_a_row_has_speed_size_and_search(kind, name):
    row = measure_format(kind, name, **SMALL)
    assert row["samples_per_s_p20"] <= row["samples_per_s"] <= row["samples_per_s_p80"]
    assert row["cache"] == "warm" and row["n"] == 2
    assert all(row[column] > 0 for column in ("build_s", "raw_s", "subset_s", "find_s", "mb_per_s"))
    assert row["files"] == {"files": 41, "mapped": 1}.get(name, 28)  # 14 shards of 3, each with its index
    assert row["bytes_on_disk"] > row["payload_bytes"] or (kind, name) == ("tokens", "tfrecord")  # varints


@pytest.mark.skipif("webdataset" not in HERE, reason="webdataset is not installed")
def test_shards_are_measured_by_their_index_as_well():
    rows = [measure_format("image", variant, **SMALL) for variant in ("webdataset", BY_INDEX)]
    assert rows[0]["build_s"] == rows[1]["build_s"] and rows[0]["samples_per_s"] != rows[1]["samples_per_s"]


def test_small_files_round_up_to_blocks():
    files, mapped = (measure_format("image", name, **SMALL) for name in ("files", "mapped"))
    if not files["bytes_allocated"]:
        pytest.skip("the file system does not say what it allocates")
    extra = [row["bytes_allocated"] - row["bytes_on_disk"] for row in (files, mapped)]
    assert extra[0] > 40 * 512 > 0 and extra[0] > extra[1]


@pytest.mark.parametrize("order", ["sequential", "shuffled", "random"])
def test_every_order_is_measured_with_workers(order):
    assert measure_format("tokens", "mapped", workers=2, order=order, **SMALL)["samples_per_s"] > 0


def test_data_is_built_once():
    first = prepared("tokens", 10, "mapped")
    assert prepared("tokens", 10, "mapped") is first and first.touched[0] == 10


def test_an_epoch_that_misses_a_sample_is_no_measurement(monkeypatch):
    measure_format("tokens", "mapped", **SMALL)
    monkeypatch.setattr(format_speed.Stream, "__iter__", lambda self: iter([(1, 4, 5)]))
    with pytest.raises(Disagreement, match="mapped gave"):
        measure_format("tokens", "mapped", **SMALL)


@pytest.fixture
def file(tmp_path):
    file = tmp_path / "file"
    file.write_bytes(os.urandom(10 * mmap.PAGESIZE + 5))
    flush(tmp_path)
    return file


def test_pages_are_in_the_cache_when_read_and_gone_when_evicted(file):
    file.read_bytes()
    assert cached_pages(file) == (11, 11)
    state = evict([file])
    if state.startswith("warm"):
        pytest.skip(f"this file system keeps its pages: {state}")
    assert state in ("data", "data and inodes") and cached_pages(file) == (0, 11)


def test_without_permission_only_data_is_dropped(file, monkeypatch, tmp_path):
    monkeypatch.setattr(format_speed, "DROP", str(tmp_path / "no" / "such"))
    assert evict([file]) == "data" or evict([file]).startswith("warm")


@pytest.mark.skipif(not Path("/dev/shm").is_dir(), reason="no file system in memory")
def test_where_the_file_system_keeps_its_pages_there_is_no_cold_speed(monkeypatch):
    folder = tempfile.TemporaryDirectory(dir="/dev/shm")
    monkeypatch.setattr(format_speed, "_temporary_folder", lambda: folder)
    row = measure_format("tokens", "mapped", cold=True, count=41, repeats=2)
    assert row["status"].startswith("not cold: ") and "samples_per_s" not in row
    assert row["build_s"] > 0
    folder.cleanup()


def test_cold_speed_comes_with_how_cold_it_was():
    row = measure_format("image", "webdataset", cold=True, **SMALL)
    assert row.get("status", "").startswith("not cold") or row["cache"] in ("data", "data and inodes")
