"""The lab on a GPU: times are the device's, memory is the allocator's, running out of it is a row."""

import gc
import time

import pytest
import torch

from helpers.book.table import Table
from helpers.lab import bench, environment, peak_memory


def test_bench_times_the_device_and_not_the_queue():
    a = torch.randn(8192, 8192, device="cuda")
    timing = bench(lambda: a @ a)
    start = time.perf_counter()
    a @ a
    queued_ms = (time.perf_counter() - start) * 1e3
    torch.cuda.synchronize()
    assert timing.median_ms > 10 * queued_ms
    assert timing.n >= 20


def test_bench_agrees_with_tritons():
    testing = pytest.importorskip("triton.testing")
    a = torch.randn(8192, 8192, device="cuda")
    theirs = testing.do_bench(lambda: a @ a, return_mode="median")
    assert bench(lambda: a @ a).median_ms == pytest.approx(theirs, rel=0.15)


def test_peak_memory_is_the_allocators():
    """Three blocks of 4 MiB; one that was cached is handed out whole where less than 1 MiB of it would be left over."""
    gc.collect()
    torch.cuda.empty_cache()
    memory = peak_memory(lambda: [torch.empty(2**20, device="cuda") for _ in range(3)])
    assert memory.added_bytes == memory.kept_bytes
    assert 3 * 4 * 2**20 <= memory.kept_bytes < 3 * 5 * 2**20


def test_running_out_of_memory_is_a_row_and_frees_it():
    def hog(gib):
        return {"held": [torch.empty(2**30, device="cuda") for _ in range(gib)].__len__()}

    too_much = torch.cuda.get_device_properties(0).total_memory // 2**32 + 2
    e = Table("lab", "hog", hog, {"full": [{"gib": too_much}, {"gib": 1}]}, 1)
    table = e("full")
    assert table["status"].tolist() == ["out of memory", "ok"]
    assert torch.cuda.memory_allocated() < 2**30


def test_the_environment_names_gpu_and_driver():
    facts = environment()
    assert facts["gpu"] == torch.cuda.get_device_name()
    assert facts["driver"] not in ("", "none", "unknown")
