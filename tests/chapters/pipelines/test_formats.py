import mmap
import os
import tempfile
from importlib import import_module
from pathlib import Path

import pytest

from helpers.chapters.pipelines.formats import COLD, NOT_COLD, VARIANTS, WARM, cached_pages, evict, formats
from helpers.lab import Disagreement
from helpers.lab.machine import missing_because
from helpers.pipelines.formats import FORMATS

MODULE = import_module("helpers.chapters.pipelines.formats")

COUNT = 40
HERE = [name for name, (written, _) in VARIANTS.items() if not missing_because(*FORMATS[written].needs)]


def row_of(kind, name, cached=WARM, order="sequential"):
    return formats.measure(kind, name, COUNT, order, cached)


@pytest.mark.parametrize("kind", ["image", "tokens"])
def test_a_row_has_speed_size_and_search(kind, monkeypatch):
    monkeypatch.setattr(MODULE, "evict", lambda files: "data")
    for name in HERE:
        row = row_of(kind, name, COLD)
        assert row["samples_per_s_p20"] <= row["samples_per_s"] <= row["samples_per_s_p80"]
        assert row["cache"] == "data" and row["n"] == 3
        assert all(row[column] > 0 for column in ("build_s", "raw_s", "subset_s", "find_s", "mb_per_s"))
        assert row["files"] == {"files": 41, "mapped": 1}.get(name, 28)  # 14 shards of 3, each with its index


def test_a_data_set_is_built_once_and_small_files_round_up_to_blocks():
    files, again, mapped = (row_of("image", name) for name in ("files", "files", "mapped"))
    assert files["build_s"] == again["build_s"]
    if not files["bytes_allocated"]:
        pytest.skip("the file system does not say what it allocates")
    extra = [row["bytes_allocated"] - row["payload_bytes"] for row in (files, mapped)]
    assert extra[0] > 40 * 512 > 0 and extra[0] > extra[1]


def test_an_epoch_that_misses_a_sample_is_no_measurement(monkeypatch):
    monkeypatch.setattr(MODULE.Epoch, "__iter__", lambda self: iter([(1, 4, 5)]))
    with pytest.raises(Disagreement, match="mapped gave"):
        row_of("tokens", "mapped")


def test_pages_are_in_the_cache_when_read_and_gone_when_evicted(tmp_path, monkeypatch):
    file = tmp_path / "file"
    file.write_bytes(os.urandom(10 * mmap.PAGESIZE + 5))
    os.sync()
    assert file.read_bytes() and cached_pages(file) == (11, 11)
    state = evict([file])
    if state.startswith(NOT_COLD):
        pytest.skip(f"this file system keeps its pages: {state}")
    assert state in ("data", "data and inodes") and cached_pages(file) == (0, 11)
    monkeypatch.setattr(MODULE, "DROP", str(tmp_path / "no" / "such"))  # without permission
    assert evict([file]) == "data"


@pytest.mark.skipif(not Path("/dev/shm").is_dir(), reason="no file system in memory")
def test_where_the_file_system_keeps_its_pages_there_is_no_cold_speed(monkeypatch):
    folder = tempfile.TemporaryDirectory(dir="/dev/shm")
    monkeypatch.setattr(MODULE, "_temporary_folder", lambda: folder)
    row = formats.measure("image", "mapped", COUNT + 1, "sequential", COLD)
    assert row["status"].startswith(NOT_COLD) and "samples_per_s" not in row
    assert row["build_s"] > 0
    folder.cleanup()
