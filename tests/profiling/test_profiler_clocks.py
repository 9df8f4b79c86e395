"""The profiler in real time, and on a device whose events are the host's."""

import time
from types import SimpleNamespace

import pytest
import torch
from profiling_cases import plan
from torch import nn

from helpers.profiling import meters, module_profiler
from helpers.profiling.module_profiler import ModuleProfiler


class FakeEvent:
    """A CUDA event of a device that is the host."""

    def __init__(self, enable_timing):
        assert enable_timing

    def record(self):
        self.at = time.perf_counter_ns()

    def elapsed_time(self, other):
        return (other.at - self.at) / 1e6


@pytest.fixture
def waits(monkeypatch):
    """What the profiler asks of torch.cuda, answered by the host; its waits are counted."""
    waits = []
    answers = {"Event": FakeEvent, "synchronize": waits.append}
    monkeypatch.setattr(meters.torch, "cuda", SimpleNamespace(**answers))
    monkeypatch.setattr(module_profiler, "HostClock", lambda: meters.DeviceClock(torch.device("cuda")))
    return waits


def test_nothing_waits_between_steps(waits):
    model = nn.Sequential(nn.Linear(16, 64), nn.ReLU(inplace=True), nn.Linear(64, 1))
    with ModuleProfiler(model, schedule=plan(0, 0, 3)) as profiler:
        before = len(waits)
        for _ in range(3):
            model(torch.ones(8, 16)).sum().backward()
            profiler.step()
        assert len(waits) == before
    table = profiler.summary().set_index("module")
    assert len(waits) > before
    assert (table.backward_ms.filter(like="model") > 0).all()
    assert table.self_ms.drop("step").sum() == pytest.approx(table.self_ms["step"])


def test_a_mark_on_another_stream_is_not_before_the_one_that_precedes_it(waits):
    clock = meters.DeviceClock(torch.device("cuda", 0))
    marks = [clock.mark() for _ in range(3)]
    for mark, at in zip(marks, (5_000, 7_000, 6_000), strict=True):
        mark.at = at
    assert clock.read(marks).tolist() == [0, 2_000, 2_000]
