"""The training on clothes on a GPU: what only shows there."""

import pytest
import torch
from training_cases import plain_vit_state

from helpers.training import CLOTHES, Precision
from helpers.training.step import CapturedStep

SPEED_ONLY = [switch.name for switch in CLOTHES.switches if switch.changes is None]
CLEAN = CLOTHES.fixed - {"bf16", "photos_on_device"}


@pytest.fixture(scope="module", autouse=True)
def settings():
    """Convolutions in full fp32."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.backends.cudnn, "allow_tf32", False)
        yield


def observe(fixes, **changes):
    seen = []

    def look(step):
        gradients = {name: parameter.grad.clone() for name, parameter in step.model.named_parameters()}
        seen.append({"loss": step.loss.clone()} | plain_vit_state(gradients))

    return CLOTHES.run(fixes, epochs=2, steps=8, dropout=0.0, on_step=look, **changes), seen


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


@pytest.mark.parametrize("name", SPEED_ONLY)
def test_a_speed_only_fix_leaves_losses_and_gradients_as_they_are(name, slow):
    assert_same(observe({name}), slow)


def test_a_step_that_is_recorded_and_replayed_is_the_step(clean):
    """Eight steps: three before recording, the recorded one, and replays on batches of their own."""
    assert_same(observe(CLEAN | {"cuda_graph"}), clean)


def test_recording_goes_with_every_other_fix():
    result = CLOTHES.run({switch.name for switch in CLOTHES.switches}, epochs=2)
    assert result["steps"] == 8
    assert torch.isfinite(torch.tensor(result["train_loss"]))


def test_a_scaled_step_that_asks_the_host_is_not_recorded():
    trainer = CLOTHES.prepare(CLEAN - {"fused_optimizer"} | {"cuda_graph"}, precision=Precision("dynamic"))
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


@pytest.mark.parametrize("fixes", [CLEAN, CLOTHES.fixed], ids=["loader", "on the device"])
def test_a_fixed_step_never_waits_for_the_device(fixes, no_waiting):
    trainer = CLOTHES.prepare(fixes)
    batches = trainer.epoch(0)
    trainer.step(next(batches))
    no_waiting()
    trainer.step(next(batches))


@pytest.mark.parametrize("name", ["no_item", "streaming_metrics", "constants_once"])
def test_a_step_that_reads_or_copies_waits(name, no_waiting):
    trainer = CLOTHES.prepare(CLEAN - {name})
    batches = trainer.epoch(0)
    trainer.step(next(batches))
    no_waiting()
    with pytest.raises(RuntimeError, match="synchroniz"):
        trainer.step(next(batches))
