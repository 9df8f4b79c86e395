"""The profiler on a GPU: times are the device's, nothing waits, memory is the allocator's."""

import statistics
import time

import pytest
import torch
from profiling_cases import plan
from torch import nn
from torch.profiler import ProfilerAction

from helpers.lab import bench, phases
from helpers.profiling.module_profiler import ModuleProfiler


def products(size=4096, layers=3):
    return nn.Sequential(*(nn.Linear(size, size, bias=False) for _ in range(layers))).cuda()


def profiled(model, step, schedule=None, steps=12):
    with ModuleProfiler(model, schedule=schedule or plan(1, 1, 10)) as profiler:
        for _ in range(steps):
            step()
            profiler.step()
    return profiler, profiler.summary().set_index("module")


@pytest.mark.alone
def test_a_products_time_is_the_devices_in_forward_and_in_backward():
    model, x = products(), torch.randn(4096, 4096, device="cuda")
    _, table = profiled(model, lambda: model(x).backward(x))
    with torch.no_grad():
        forward_ms = bench(lambda: model[1](x)).median_ms
    assert table.forward_ms["model.1"] == pytest.approx(forward_ms, rel=0.1)
    assert table.backward_ms["model.1"] == pytest.approx(2 * forward_ms, rel=0.2)
    assert table.backward_ms["model.0"] == pytest.approx(forward_ms, rel=0.2)  # the input has no gradient


@pytest.mark.alone
def test_module_times_add_up_to_the_step_and_agree_with_the_lab():
    layer = nn.TransformerEncoderLayer(512, 8, 2048, dropout=0.0, batch_first=True)
    model, x = nn.TransformerEncoder(layer, 6, enable_nested_tensor=False).cuda(), torch.randn(64, 256, 512).cuda()

    def step():
        loss = model(x).square().mean()
        yield "forward"
        loss.backward()
        yield "backward"

    profiler, table = profiled(model, lambda: list(step()))
    assert table.self_ms.drop("step").sum() == pytest.approx(table.total_ms["step"], rel=0.05)
    timings = phases(step)
    assert table.forward_ms["model"] == pytest.approx(timings["forward"].median_ms, rel=0.1)
    assert table.backward_ms["model"] == pytest.approx(timings["backward"].median_ms, rel=0.1)
    assert profiler.summary().attrs["device"] == "cuda:0"


def test_nothing_waits_inside_a_step():
    """Not even in the step that weighs memory."""
    model, x = products(512), torch.randn(64, 512, device="cuda")

    def step():
        torch.cuda.set_sync_debug_mode("error")
        try:
            model(x).sum().backward()
        finally:
            torch.cuda.set_sync_debug_mode("default")

    profiled(model, step)


def test_the_host_stays_ahead_of_the_device():
    model, x = products(8192), torch.randn(8192, 8192, device="cuda")
    with ModuleProfiler(model, schedule=plan(1, 0, 5)) as profiler:
        for _ in range(2):
            model(x).backward(x)
            profiler.step()
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(4):
            model(x).backward(x)
            profiler.step()
        queued_ms = (time.perf_counter() - start) * 1e3
    assert queued_ms < profiler.summary().total_ms.iloc[-1]


def test_peak_is_what_a_call_needs_above_where_it_began():
    class Hungry(nn.Module):
        def __init__(self, mib):
            super().__init__()
            self.weight, self.mib = nn.Parameter(torch.ones((), device="cuda")), mib

        def forward(self, x):
            torch.empty(self.mib * 2**20, dtype=torch.uint8, device="cuda")
            return x * self.weight

    model, x = nn.Sequential(Hungry(64), Hungry(256)), torch.ones(2**20, device="cuda")  # 4 MiB
    _, table = profiled(model, lambda: model(x).sum().backward())
    assert table.peak_mib["model.0"] == pytest.approx(64, abs=5)
    assert table.peak_mib["model.1"] == pytest.approx(256, abs=5)
    assert table.peak_mib["model"] == pytest.approx(260, abs=5)
    assert table.peak_mib["step"] >= table.peak_mib["model"]
    assert table.activation_mib["model"] == pytest.approx(8, abs=0.1)  # x, and what the first returned


def test_peak_statistics_count_again_after_the_warm_up():
    model, x = products(1024), torch.randn(1024, 1024, device="cuda")

    def step():
        model(x).sum().backward()

    torch.cuda.reset_peak_memory_stats()
    for _ in range(3):
        step()
    before = torch.cuda.max_memory_allocated()
    profiled(model, step)
    assert torch.cuda.max_memory_allocated() >= before


@pytest.mark.alone
def test_it_costs_less_than_5_percent_of_a_step_of_20_ms():
    layer = nn.TransformerEncoderLayer(768, 12, 3072, dropout=0.0, batch_first=True)
    model, rows = nn.TransformerEncoder(layer, 12, enable_nested_tensor=False).cuda(), 4

    def timed(rows):
        x = torch.zeros(rows, 256, 768, device="cuda")
        torch.cuda.synchronize()
        start = time.perf_counter()
        with torch.autocast("cuda", torch.bfloat16):
            loss = model(x).square().mean()
        loss.backward()
        torch.cuda.synchronize()
        return (time.perf_counter() - start) * 1e3

    while min(timed(rows) for _ in range(3)) < 20:
        rows += 4
    turns, in_turn = [[], []], [ProfilerAction.NONE, ProfilerAction.RECORD]
    with ModuleProfiler(model, schedule=lambda step: in_turn[step % 2]) as profiler:
        for step in range(60):
            turns[step % 2].append(timed(rows))
            profiler.step()
    plain, watched = (statistics.median(turn[5:]) for turn in turns)
    assert watched / plain < 1.05
