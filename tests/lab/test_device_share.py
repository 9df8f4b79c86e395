"""The share of a time in which a GPU works, from what a profiler would tell of it."""

from types import SimpleNamespace

import pytest
import torch
from torch.autograd import DeviceType

from helpers.lab import bench, compare, device_share, phases
from helpers.lab.device_share import busy_phases, host_bound, intervals_of, union


def event(name, start, length, kind=DeviceType.CUDA, annotation=False):
    values = {"name": name, "start_ns": start, "duration_ns": length, "device_type": kind}
    methods = {method: lambda value=value: value for method, value in values.items()}
    return SimpleNamespace(**methods, is_user_annotation=lambda: annotation)


@pytest.fixture
def gpu(monkeypatch):
    """A GPU whose profiler tells what a call returns, in ns."""
    monkeypatch.setattr(device_share, "device", lambda: torch.device("cuda"))
    monkeypatch.setattr(device_share, "_warm_profiler", lambda: None)
    monkeypatch.setattr(device_share, "_profiled", lambda run: run())


@pytest.mark.parametrize(
    ("intervals", "length"), [([], 0), ([(5, 9), (0, 2)], 6), ([(0, 10), (2, 3), (8, 12)], 12), ([(0, 2), (2, 4)], 4)]
)
def test_kernels_that_run_at_the_same_time_count_once(intervals, length):
    assert union(intervals) == length


def test_only_kernels_and_copies_count_and_not_the_sleep_that_lets_the_host_ahead():
    events = [
        event("cudaLaunchKernel", 0, 50, DeviceType.CPU),
        event("at::cuda::(anonymous namespace)::spin_kernel(long)", 0, 90),
        event("step", 100, 40, annotation=True),
        event("gemm", 100, 20),
        event("Memcpy DtoD", 130, 5),
    ]
    assert intervals_of(events) == [(100, 120), (130, 135)]


def test_the_share_is_of_the_unprofiled_median(gpu):
    assert device_share.device_share(lambda: [(0, 600_000), (500_000, 900_000)], 1.0) == {"device_share": 0.9}
    assert device_share.device_share(lambda: [], 1.0) == {}, "the profiler saw no kernel"


def test_what_runs_before_is_not_profiled(gpu):
    order = []
    device_share.busy_ms(lambda: order.append("run") or [], before=lambda: order.append("before"))
    assert order == ["before", "run"]


def test_phases_are_profiled_apart_and_what_follows_the_last_still_runs(gpu, monkeypatch):
    ended = []

    def step():
        yield [(0, 2_000_000)]
        yield [(0, 1_000_000)]
        ended.append(True)

    assert busy_phases(step, ["forward", "backward"]) == {"forward": 2.0, "backward": 1.0}
    assert ended


def test_on_a_cpu_nothing_runs_once_more_and_rows_have_no_such_column():
    calls = []
    timing = bench(lambda: calls.append(1), repeat=5, warmup=1, seconds=0)
    assert (len(calls), "device_share" in timing.row()) == (6, False)

    def step():
        calls.append(1)
        yield "run"

    phases(step, repeat=5, warmup=1, seconds=0)
    assert len(calls) == 12
    assert "device_share" not in compare({"a": lambda: None}, rounds=8, check=False).row("a", "a")


@pytest.mark.parametrize(("share", "bound"), [(0.89, True), (0.9, False), (float("nan"), False), (None, False)])
def test_a_row_is_host_bound_below_nine_tenths_and_not_where_that_is_unknown(share, bound):
    assert host_bound({"device_share": share}) == bound
    assert not host_bound({"median_ms": 1.0})
