"""The profiler on a device whose events are the host's."""

import time

import pytest
import torch
from profiling_cases import plan
from torch import nn

from helpers.profiling import module_profiler
from helpers.profiling.module_profiler import ModuleProfiler, Step, _times


class FakeEvent:
    """A CUDA event of a device that is the host."""

    def __init__(self):
        self.at = time.perf_counter_ns()

    def elapsed_time(self, other):
        return (other.at - self.at) / 1e6


def test_nothing_waits_between_steps(monkeypatch):
    waits = []
    monkeypatch.setattr(module_profiler, "clock", lambda device: FakeEvent)
    monkeypatch.setattr(module_profiler, "synchronize", waits.append)
    model = nn.Sequential(nn.Linear(16, 64), nn.ReLU(inplace=True), nn.Linear(64, 1))
    with ModuleProfiler(model, schedule=plan(0, 0, 3)) as profiler:
        for _ in range(3):
            model(torch.ones(8, 16)).sum().backward()
            profiler.step()
        assert not waits
    table = profiler.summary().set_index("module")
    assert waits
    assert (table.backward_ms.filter(like="model") > 0).all()
    assert table.self_ms.drop("step").sum() == pytest.approx(table.self_ms["step"])


def test_a_mark_on_another_stream_is_not_before_the_one_that_precedes_it():
    step = Step([FakeEvent() for _ in range(3)], [(None, False)] * 3)
    for mark, at in zip(step.marks, (5_000, 7_000, 6_000), strict=True):
        mark.at = at
    assert _times(step, 0)[-1, -1] == 2_000
