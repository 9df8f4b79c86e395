"""The language model's pipeline on a GPU: what only shows there."""

import math

import pytest
import torch

from helpers.batching.attention import missing_because
from helpers.lab import peak_memory
from helpers.profiling.gpt_pipeline import ALL, FIXED, SWITCHES, cumulative, prepare, run
from helpers.profiling.gpt_slow import plain_state

pytest.importorskip("torchtext", reason="the text is tokenised by torchtext, which isn't here", exc_type=ImportError)

SPEED_ONLY = [switch.name for switch in SWITCHES if switch.changes is None and not switch.optional]
CLEAN = FIXED - {"bf16"}


@pytest.fixture(scope="module", autouse=True)
def full_precision():
    """Products in full fp32, whatever was asked for before."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    yield
    torch.set_float32_matmul_precision(before)


def observe(fixes):
    seen = []

    def look(number, loss, model):
        gradients = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
        seen.append({"loss": loss.clone()} | plain_state(gradients))

    return run(fixes, epochs=2, steps=8, dropout=0.0, on_step=look), seen


@pytest.fixture(scope="module")
def slow():
    return observe(frozenset())


@pytest.fixture(scope="module")
def clean():
    return observe(CLEAN)


def assert_same(one, other):
    assert len(one[1]) == len(other[1]) == 8
    for ours, theirs in zip(one[1], other[1], strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=1e-2)
    assert one[0]["validation_loss"] == pytest.approx(other[0]["validation_loss"], rel=1e-3)


@pytest.mark.parametrize("name", SPEED_ONLY)
def test_a_speed_only_fix_leaves_losses_and_gradients_as_they_are(name, slow):
    assert_same(observe({name}), slow)


@pytest.mark.parametrize("name", SPEED_ONLY)
def test_a_speed_only_fault_in_a_clean_loop_changes_no_number_either(name, clean):
    assert_same(observe(CLEAN - {name}), clean)


@pytest.mark.parametrize("fixes", cumulative()[:-1], ids=len)
def test_every_stage_of_the_repair_runs(fixes):
    found = run(fixes, steps=2)
    assert found["train_loss"] == pytest.approx(math.log(499), rel=0.1)
    assert found["peak_gib"] > 0


@pytest.mark.parametrize("fixes", [{"packed", "bf16", "fused_attention"}, FIXED - {"width_1024"}], ids=len)
def test_packs_are_attended_to_whatever_the_heads_width(fixes):
    assert run(fixes, steps=2)["train_loss"] == pytest.approx(math.log(499), rel=0.1)


def test_a_compiled_step_is_the_step():
    compiled, eager = (run(fixes, epochs=2, dropout=0.0) for fixes in (ALL, FIXED))
    assert compiled["steps"] == eager["steps"]
    assert compiled["train_loss"] == pytest.approx(eager["train_loss"], rel=2e-2)


def test_the_fixed_sizes_take_the_kernels_that_they_were_chosen_for():
    if reason := missing_because("varlen", "cuda", torch.bfloat16):
        pytest.skip(f"varlen: {reason}")
    training = prepare(FIXED, preset="full", samples=256, validation_samples=64)
    batch = next(training.epoch(0))
    training.step(batch)
    with torch.profiler.profile() as profiler:
        training.step(batch)
    assert any("flash" in event.key for event in profiler.key_averages())


@pytest.fixture
def no_waiting():
    """Turns a wait for the device into an error, from the call of what is given on."""
    yield lambda: torch.cuda.set_sync_debug_mode("error")
    torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("fixes", [CLEAN - {"packed"}, CLEAN, FIXED], ids=["padded", "packed", "fixed"])
def test_a_fixed_step_never_waits_for_the_device(fixes, no_waiting):
    training = prepare(fixes)
    batches = training.epoch(0)
    training.step(next(batches))
    no_waiting()
    training.step(next(batches))


@pytest.mark.parametrize("name", ["no_item", "streaming_accuracy"])
def test_a_step_that_reads_waits(name, no_waiting):
    training = prepare(CLEAN - {name})
    batches = training.epoch(0)
    training.step(next(batches))
    batch = next(batches)
    no_waiting()
    with pytest.raises(RuntimeError, match="synchroniz"):
        training.step(batch)


def test_what_is_kept_or_written_for_nothing_takes_memory():
    def step_of(fixes):
        training = prepare(fixes)
        batch = next(training.epoch(0))
        training.step(batch)
        return lambda: training.step(batch)

    validation, steps = [], []
    for removed in ("inference_mode", "fused_loss"), ():
        validation.append(peak_memory(prepare(CLEAN.difference(removed)).validate).added_bytes)
        steps.append(peak_memory(step_of(CLEAN.difference(removed))).added_bytes)
    assert validation[0] > 1.2 * validation[1]
    assert steps[0] > steps[1]
