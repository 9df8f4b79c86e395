"""The planted loops on a GPU: what the host's trace can't show, and that a clean loop is clean there too."""

from statistics import mean

import pytest
import torch
from profiling import loops

from helpers.profiling import findings as finding
from helpers.profiling.device_time import device_idle_share, device_windows, timeline
from helpers.profiling.diagnose import diagnose
from helpers.profiling.read_trace import read_trace
from helpers.profiling.trace import KERNEL

PLANTS = loops.ON_CPU | loops.ON_CUDA_ONLY


@pytest.fixture(scope="module")
def clean():
    return read_trace(loops.run(device="cuda"))


def test_a_clean_loop_has_no_findings(clean):
    table = diagnose(clean)
    assert table.empty, table.to_string()


@pytest.mark.parametrize("plant", PLANTS)
def test_what_is_planted_is_found_alone_by_its_name(plant):
    table = diagnose(loops.run(plant, device="cuda", steps=5))
    # Emptying the cache waits for the device too; heads of 255 may leave attention no fused kernel.
    allowed = {"empty cache": {finding.HOST_WAITS}, "width 255": {finding.ATTENTION}}.get(plant, set())
    assert PLANTS[plant] in set(table["finding"]) <= {PLANTS[plant]} | allowed, table.to_string()


def kernel_ms(trace):
    return sum(e.us for e in trace.device if e.kind == KERNEL and trace.step_of(e) is not None) / 1e3


def test_kernel_time_and_idle_time_make_up_the_steps(clean):
    """On one stream kernels don't overlap: their time is what the idle share leaves of a step."""
    kernels_ms = kernel_ms(clean) / len(clean.steps)
    step_ms = mean((end - begin) / 1e3 for begin, end in device_windows(clean))
    assert kernels_ms == pytest.approx((1 - device_idle_share(clean)) * step_ms, rel=0.15)


def test_a_timeline_has_every_track(clean):
    assert {"host", "backward thread"} <= set(timeline(clean)["track"])
    assert any(track.startswith("stream") for track in timeline(clean)["track"])


def test_every_kernel_has_the_op_that_launched_it(clean):
    without = [e.name for e in clean.device if not any(outer.kind == "op" for outer in e.outer())]
    assert len(without) <= 0.01 * len(clean.device), sorted(set(without))


def test_a_wait_lasts_as_long_as_the_work_before_it():
    """The host queues 20 large products, then reads one number: nearly all of their time is waited."""
    a = torch.randn(4096, 4096, device="cuda", dtype=torch.bfloat16)

    def step():
        for _ in range(20):
            a @ a
        return a[0, 0].item()

    step()
    with torch.profiler.profile() as prof:
        step()
    trace = read_trace(prof)
    kernels = kernel_ms(trace)
    waited = diagnose(trace).query("finding == @finding.HOST_WAITS")["cost_ms"].sum()
    assert waited == pytest.approx(kernels, rel=0.3)
