"""Loss and accuracy over real tokens, against a loop that counts them one by one."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from helpers.metrics import LMAccuracy, LMCrossEntropyLoss, PixelAccuracy, StreamingMetrics

BATCHES = st.tuples(
    st.integers(1, 4), st.integers(1, 6), st.integers(2, 7), st.integers(0, 10**6), st.sampled_from([0, 1, -100])
)


class NoReadOfValues(TorchDispatchMode):
    """Fails where an operation brings a tensor's value to the host."""

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        assert "_local_scalar_dense" not in str(operation), f"{operation} makes the host wait"
        return operation(*args, **kwargs or {})


def batch(rows, length, classes, seed, pad_id):
    generator = torch.Generator().manual_seed(seed)
    logits = 3 * torch.randn(rows, length, classes, generator=generator)
    targets = torch.randint(0, classes, (rows, length), generator=generator)
    targets[torch.rand(rows, length, generator=generator) < 0.3] = pad_id
    return logits, targets


def naive(logits, targets, pad_id):
    """Sum of losses, right answers and real tokens, in plain Python."""
    loss, right, real = 0.0, 0, 0
    for row, answers in zip(logits.tolist(), targets.tolist(), strict=True):
        for scores, answer in zip(row, answers, strict=True):
            if answer != pad_id:
                loss += math.log(sum(math.exp(score) for score in scores)) - scores[answer]
                right += max(range(len(scores)), key=scores.__getitem__) == answer
                real += 1
    return loss, right, real


@settings(max_examples=20, deadline=None)
@given(BATCHES)
def test_the_loss_is_the_mean_over_real_tokens(drawn):
    logits, targets = batch(*drawn)
    loss, _, real = naive(logits, targets, drawn[-1])
    result = LMCrossEntropyLoss(pad_id=drawn[-1])(logits, targets).item()
    assert result == pytest.approx(loss / max(real, 1), rel=1e-4, abs=1e-5)


@settings(max_examples=20, deadline=None)
@given(st.lists(BATCHES, min_size=1, max_size=4), st.sampled_from([0, 1]))
def test_accuracy_adds_up_over_batches_of_any_sizes(drawn, pad_id):
    accuracy, rights, reals = LMAccuracy(pad_id), 0, 0
    for *sizes, _ in drawn:
        logits, targets = batch(*sizes, pad_id)
        _, right, real = naive(logits, targets, pad_id)
        rights, reals = rights + right, reals + real
        accuracy.update(logits, targets)
    assert accuracy.compute() == pytest.approx(rights / reals if reals else math.nan, nan_ok=True)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_a_batch_of_padding_has_loss_0_and_gradient_0(dtype):
    logits = torch.randn(2, 3, 5, dtype=dtype, requires_grad=True)
    loss = LMCrossEntropyLoss()(logits, torch.zeros(2, 3, dtype=torch.long))
    loss.backward()
    assert loss.item() == 0
    assert torch.equal(logits.grad, torch.zeros_like(logits))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_logits_lose_nothing_but_their_own_rounding(dtype):
    torch.manual_seed(0)
    logits, targets = torch.randn(4, 8, 3000).to(dtype), torch.randint(1, 3000, (4, 8))
    logits[..., 0] = 30  # a target's probability is then below what fp16 can hold
    result = LMCrossEntropyLoss()(logits, targets)
    assert result.dtype == torch.float32
    assert result.item() == pytest.approx(LMCrossEntropyLoss()(logits.double(), targets).item(), rel=1e-5)


def test_nothing_waits_for_the_device_before_compute():
    accuracy, pixels = LMAccuracy(), PixelAccuracy()
    logits, targets = batch(2, 4, 5, 0, 0)
    with NoReadOfValues():
        for _ in range(3):
            accuracy.update(logits, targets)
            pixels.update(logits, (logits > 1).float())
            LMCrossEntropyLoss()(logits, targets)
    with pytest.raises(AssertionError, match="makes the host wait"), NoReadOfValues():
        targets.sum().item()
    assert 0 <= accuracy.compute() <= 1


def test_reset_starts_again():
    accuracy, (logits, targets) = LMAccuracy(), batch(2, 4, 5, 0, 0)
    accuracy.update(logits, targets)
    accuracy.reset()
    assert math.isnan(accuracy.compute())
    accuracy.update(targets, targets)  # predictions instead of logits
    assert accuracy.compute() == 1


@settings(max_examples=20, deadline=None)
@given(st.lists(st.tuples(st.floats(-3, 3, width=32), st.booleans()), min_size=1, max_size=20), st.integers(1, 3))
def test_pixel_accuracy_counts_both_classes(pixels, times):
    logits = torch.tensor([logit for logit, _ in pixels]).reshape(1, 1, 1, -1)
    masks = torch.tensor([float(mask) for _, mask in pixels]).reshape(1, 1, 1, -1)
    accuracy = PixelAccuracy()
    for _ in range(times):
        accuracy.update(logits, masks)
    expected = sum((logit > 0) == mask for logit, mask in pixels) / len(pixels)
    assert accuracy.compute() == pytest.approx(expected)
    for predicted, truth in ((logits > 0, masks), ((logits > 0).long(), masks.bool())):
        accuracy.reset()
        accuracy.update(predicted, truth)
        assert accuracy.compute() == pytest.approx(expected)


def test_shapes_that_would_broadcast_are_named():
    with pytest.raises(ValueError, match=r"output \(2, 3, 5\) and targets \(2, 4\)"):
        LMCrossEntropyLoss()(torch.zeros(2, 3, 5), torch.ones(2, 4, dtype=torch.long))
    with pytest.raises(ValueError, match=r"output \(2, 3, 5\) and targets \(2, 4\)"):
        LMAccuracy().update(torch.zeros(2, 3, 5), torch.ones(2, 4, dtype=torch.long))
    with pytest.raises(
        ValueError, match=r"output \(2, 1, 4, 4\) and targets \(2, 4, 4\): they must share the same shape"
    ):
        PixelAccuracy().update(torch.zeros(2, 1, 4, 4), torch.ones(2, 4, 4))


def test_logits_of_other_classes_are_refused():
    with pytest.raises(ValueError, match="of 5 classes, not of 3"):
        StreamingMetrics(3).update(torch.randn(7, 5), torch.randint(3, (7,)))


@pytest.mark.parametrize("empty", [False, True], ids=["", "a rank without a batch"])
def test_scores_are_those_of_all_ranks(monkeypatch, empty):
    logits, labels = torch.randn(7, 3), torch.randint(3, (7,))
    other = torch.randn(5, 3), torch.randint(3, (5,))
    for make in (lambda: LMAccuracy(-1), lambda: StreamingMetrics(3)):
        whole, ours, theirs = make(), make(), make()
        for metric, batches in ((whole, [other] if empty else [(logits, labels), other]), (theirs, [other])):
            for batch in batches:
                metric.update(*batch)
        if not empty:
            ours.update(logits, labels)
        expected, sent = whole.compute(), []
        with monkeypatch.context() as running:
            running.setattr(torch.distributed, "is_initialized", lambda: True)
            running.setattr(torch.distributed, "all_reduce", lambda counts, sent=sent: sent.append(counts.clone()))
            theirs.compute()
            running.setattr(torch.distributed, "all_reduce", lambda counts, sent=sent: counts.add_(sent[0]))
            assert ours.compute() == ours.compute() == expected
