"""The language model's training, slow on purpose, on a GPU: what only shows there."""

import math

import pytest
import torch
from training_cases import plain_gpt_state

from helpers.batching.attention import missing_because
from helpers.lab import peak_memory
from helpers.training import LANGUAGE

pytest.importorskip("torchtext", reason="the text is tokenised by torchtext, which isn't here", exc_type=ImportError)

SPEED_ONLY = [switch.name for switch in LANGUAGE.switches if switch.changes is None and not switch.optional]
CLEAN = LANGUAGE.fixed - {"bf16"}


@pytest.fixture(scope="module", autouse=True)
def full_precision():
    """Products in full fp32, whatever was asked for before."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    yield
    torch.set_float32_matmul_precision(before)


def observe(fixes):
    seen = []

    def look(step):
        gradients = {name: p.grad.clone() for name, p in step.model.named_parameters() if p.grad is not None}
        seen.append({"loss": step.loss.clone()} | plain_gpt_state(gradients))

    return LANGUAGE.run(fixes, epochs=2, steps=8, dropout=0.0, on_step=look), seen


@pytest.fixture(scope="module")
def slow():
    return observe(frozenset())


def assert_same(one, other):
    assert len(one[1]) == len(other[1]) == 8
    for ours, theirs in zip(one[1], other[1], strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=1e-2)
    assert one[0]["validation_loss"] == pytest.approx(other[0]["validation_loss"], rel=1e-3)


@pytest.mark.parametrize("name", SPEED_ONLY)
def test_a_speed_only_fix_leaves_losses_and_gradients_as_they_are(name, slow):
    assert_same(observe({name}), slow)


NAMES = [switch.name for switch in LANGUAGE.switches]


@pytest.mark.parametrize("fixes", [NAMES[:count] for count in range(len(NAMES))], ids=len)
def test_every_stage_of_the_repair_runs(fixes):
    result = LANGUAGE.run(fixes, steps=2)
    assert result["train_loss"] == pytest.approx(math.log(499), rel=0.1)
    assert result["peak_gib"] > 0


@pytest.mark.parametrize("fixes", [{"packed", "bf16", "fused_attention"}, LANGUAGE.fixed - {"width_1024"}], ids=len)
def test_packs_are_attended_to_whatever_the_heads_width(fixes):
    assert LANGUAGE.run(fixes, steps=2)["train_loss"] == pytest.approx(math.log(499), rel=0.1)


def test_a_compiled_step_is_the_step():
    everything = {switch.name for switch in LANGUAGE.switches}
    compiled, eager = (LANGUAGE.run(fixes, epochs=2, dropout=0.0) for fixes in (everything, LANGUAGE.fixed))
    assert compiled["steps"] == eager["steps"]
    assert compiled["train_loss"] == pytest.approx(eager["train_loss"], rel=2e-2)


def test_the_fixed_sizes_take_the_kernels_that_they_were_chosen_for():
    if reason := missing_because("varlen", "cuda", torch.bfloat16):
        pytest.skip(f"varlen: {reason}")
    trainer = LANGUAGE.prepare(preset="full", samples=256, validation_samples=64)
    batch = next(trainer.epoch(0))
    trainer.step(batch)
    with torch.profiler.profile() as profiler:
        trainer.step(batch)
    assert any("flash" in event.key for event in profiler.key_averages())


@pytest.mark.parametrize("fixes", [CLEAN - {"packed"}, CLEAN, LANGUAGE.fixed], ids=["padded", "packed", "fixed"])
def test_a_fixed_step_never_waits_for_the_device(fixes, no_waiting):
    trainer = LANGUAGE.prepare(fixes)
    batches = trainer.epoch(0)
    trainer.step(next(batches))
    no_waiting()
    trainer.step(next(batches))


@pytest.mark.parametrize("name", ["no_item", "streaming_accuracy"])
def test_a_step_that_reads_waits(name, no_waiting):
    trainer = LANGUAGE.prepare(CLEAN - {name})
    batches = trainer.epoch(0)
    trainer.step(next(batches))
    batch = next(batches)
    no_waiting()
    with pytest.raises(RuntimeError, match="synchroniz"):
        trainer.step(batch)


def test_what_is_kept_or_written_for_nothing_takes_memory():
    def step_of(fixes):
        trainer = LANGUAGE.prepare(fixes)
        batch = next(trainer.epoch(0))
        trainer.step(batch)
        return lambda: trainer.step(batch)

    validation, steps = [], []
    for removed in ("inference_mode", "fused_loss"), ():
        validation.append(peak_memory(LANGUAGE.prepare(CLEAN.difference(removed)).validate).added_bytes)
        steps.append(peak_memory(step_of(CLEAN.difference(removed))).added_bytes)
    assert validation[0] > 1.2 * validation[1]
    assert steps[0] > steps[1]
