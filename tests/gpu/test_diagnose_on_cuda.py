"""The planted loops on a GPU: what the host's trace can't show, and that a clean loop is clean there too."""

import pytest
import torch
from cases import loops

from helpers.findings.account import COMPUTE, IDLE, device_account, step_ms, timeline
from helpers.findings.diagnose import diagnose
from helpers.findings.trace import KERNEL
from helpers.findings.trace_file import read_trace

pytestmark = pytest.mark.alone  # a host that has others' work, too, is what is slow
PLANTS = loops.ON_CPU | loops.ON_CUDA_ONLY


@pytest.fixture(scope="module")
def clean():
    return read_trace(loops.run(device="cuda"))


def test_a_clean_loop_has_no_findings(clean):
    diagnosis = diagnose(clean)
    assert not diagnosis.findings, str(diagnosis)


@pytest.mark.parametrize("plant", PLANTS)
def test_what_is_planted_is_found_alone_by_its_name(plant):
    diagnosis = diagnose(loops.run(plant, device="cuda", steps=5), least=0.0)
    # Emptying the cache waits for the device too; heads of 255 may leave attention no fused kernel.
    allowed = {"empty cache": {"host synchronisation"}, "width 255": {"attention from matmul and softmax"}}.get(
        plant, set()
    )
    noted = {name for name in ("graph kept in evaluation",) for note in diagnosis.notes if note.kind == name}
    large = {each.finding for each in diagnosis.findings if each.gain_share >= 0.05}  # a step of one layer has more
    assert PLANTS[plant] in set(diagnosis.table["finding"]) | noted, str(diagnosis)
    assert large <= {PLANTS[plant]} | allowed, str(diagnosis)


def kernel_ms(trace):
    return sum(e.us for e in trace.device if e.kind == KERNEL and trace.step_of(e) is not None) / 1e3


def test_kernel_time_and_idle_time_make_up_the_steps(clean):
    """On one stream kernels don't overlap: their time is what the idle share leaves of a step."""
    assert sum(device_account(clean).shares.values()) == pytest.approx(1)
    kernels_ms = kernel_ms(clean) / len(clean.steps)
    assert kernels_ms == pytest.approx((1 - device_account(clean).shares[IDLE]) * step_ms(clean), rel=0.15)


def test_a_timeline_has_every_track(clean):
    assert {"host", "backward thread"} <= set(timeline(clean)["track"])
    assert any(track.startswith("stream") for track in timeline(clean)["track"])


def test_every_kernel_has_the_op_that_launched_it(clean):
    without = [e.name for e in clean.device if not any(outer.kind == "op" for outer in e.outer())]
    assert len(without) <= 0.01 * len(clean.device), sorted(set(without))


def test_a_wait_for_a_busy_device_costs_nothing():
    """The host queues 20 large products, then reads one number: the device works nearly all of the time."""
    a = torch.randn(4096, 4096, device="cuda", dtype=torch.bfloat16)

    def step():
        for _ in range(20):
            a @ a
        return a[0, 0].item()

    step()
    with torch.profiler.profile() as prof:
        step()
    trace = read_trace(prof)
    diagnosis = diagnose(trace, least=0.0)
    assert diagnosis.account[COMPUTE] > 0.8
    assert sum(f.gain_share for f in diagnosis.findings if f.finding == "host synchronisation") < 0.1
