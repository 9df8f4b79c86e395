"""Trainings that are slow on purpose, on a GPU: what only shows there."""

import functools
import math

import pytest
import torch
from training_cases import plain_gpt_state, plain_vit_state

from helpers.batching.attention import missing_because
from helpers.training import CLOTHES, LANGUAGE, Precision
from helpers.training.trainer import CapturedStep

pytest.importorskip("torchtext", reason="the text is tokenised by torchtext, which isn't here", exc_type=ImportError)

BOTH = {"language": LANGUAGE, "clothes": CLOTHES}
PLAIN = {"language": plain_gpt_state, "clothes": plain_vit_state}
CLEAN = {"language": LANGUAGE.fixed - {"bf16"}, "clothes": CLOTHES.fixed - {"bf16", "photos_on_device"}}
SWITCHES = [(name, switch) for name, subject in BOTH.items() for switch in subject.switches]
SPEED_ONLY = [(name, s.name) for name, s in SWITCHES if s.changes is None and not (name == "language" and s.optional)]
NAMES = [switch.name for switch in LANGUAGE.switches]


@pytest.fixture(scope="module", autouse=True)
def full_precision():
    """Products and convolutions in full fp32, whatever was asked for before."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.backends.cudnn, "allow_tf32", False)
        yield
    torch.set_float32_matmul_precision(before)


@functools.cache
def observe(name, fixes=frozenset()):
    """The result of eight steps without dropout, and the loss and all gradients of each under the model's names."""
    seen = []

    def look(step):
        gradients = {name: p.grad.clone() for name, p in step.model.named_parameters() if p.grad is not None}
        seen.append({"loss": step.loss.clone()} | PLAIN[name](gradients))

    return BOTH[name].run(fixes, epochs=2, steps=8, dropout=0.0, on_step=look), seen


def assert_same(one, other):
    assert len(one[1]) == len(other[1]) == 8
    for ours, theirs in zip(one[1], other[1], strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=1e-2)


@pytest.mark.parametrize(("name", "fix"), SPEED_ONLY)
def test_a_speed_only_fix_leaves_losses_and_gradients_as_they_are(name, fix):
    fixed, slow = observe(name, frozenset({fix})), observe(name)
    assert_same(fixed, slow)
    if name == "language":
        assert fixed[0]["validation_loss"] == pytest.approx(slow[0]["validation_loss"], rel=1e-3)


def test_a_step_that_is_recorded_and_replayed_is_the_step():
    """Eight steps: three before recording, the recorded one, and replays on batches of their own."""
    assert_same(observe("clothes", CLEAN["clothes"] | {"cuda_graph"}), observe("clothes", CLEAN["clothes"]))


def test_recording_goes_with_every_other_fix():
    result = CLOTHES.run({switch.name for switch in CLOTHES.switches}, epochs=2)
    assert result["steps"] == 8
    assert torch.isfinite(torch.tensor(result["train_loss"]))


def test_a_scaled_step_that_asks_the_host_is_not_recorded():
    fixes = CLEAN["clothes"] - {"fused_optimizer"} | {"cuda_graph"}
    trainer = CLOTHES.prepare(fixes, precision=Precision("dynamic"))
    batches = [batch for epoch in range(2) for batch in trainer.epoch(epoch)]
    assert torch.isfinite(torch.stack([trainer.step(batch) for batch in batches])).all()


def test_a_smaller_batch_after_recording_is_an_ordinary_step():
    weight = torch.zeros(3, device="cuda")

    def work(x):
        weight.add_(x.sum(0))
        return (weight.clone(),)

    step, total = CapturedStep(work), torch.zeros(3, device="cuda")
    for rows in (4, 4, 4, 4, 4, 2, 4):
        x = torch.randn(rows, 3, device="cuda")
        total += x.sum(0)
        torch.testing.assert_close(step(x)[0], total)


@pytest.mark.parametrize("fixes", [NAMES[:count] for count in range(len(NAMES))], ids=len)
def test_every_stage_of_the_repair_runs(fixes):
    result = LANGUAGE.run(fixes, steps=2)
    assert result["train_loss"] == pytest.approx(math.log(499), rel=0.1)
    assert result["peak_gib"] > 0


@pytest.mark.parametrize("fixes", [{"packed", "bf16", "fused_attention"}, LANGUAGE.fixed - {"width_1024"}], ids=len)
def test_packs_are_attended_to_whatever_the_heads_width(fixes):
    assert LANGUAGE.run(fixes, steps=2)["train_loss"] == pytest.approx(math.log(499), rel=0.1)


def test_a_compiled_step_is_the_step():
    every = {switch.name for switch in LANGUAGE.switches}
    compiled, eager = (LANGUAGE.run(fixes, epochs=2, dropout=0.0) for fixes in (every, LANGUAGE.fixed))
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


def second_step(name, fixes, no_waiting):
    """A step in which a wait for the device is an error, after one that may wait."""
    trainer = BOTH[name].prepare(fixes)
    batches = trainer.epoch(0)
    trainer.step(next(batches))
    no_waiting()
    trainer.step(next(batches))


FIXED = [(name, fixes) for name in BOTH for fixes in (CLEAN[name], BOTH[name].fixed)]
FIXED += [("language", CLEAN["language"] - {"packed"})]


@pytest.mark.parametrize(("name", "fixes"), FIXED, ids=["packed", "fixed", "loader", "on the device", "padded"])
def test_a_fixed_step_never_waits_for_the_device(name, fixes, no_waiting):
    second_step(name, fixes, no_waiting)


WAITING = [("clothes", fix) for fix in ("no_item", "streaming_metrics", "constants_once")]
WAITING += [("language", fix) for fix in ("no_item", "streaming_accuracy")]


@pytest.mark.parametrize(("name", "fix"), WAITING)
def test_a_step_that_reads_or_copies_waits(name, fix, no_waiting):
    with pytest.raises(RuntimeError, match="synchroniz"):
        second_step(name, CLEAN[name] - {fix}, no_waiting)
