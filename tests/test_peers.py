"""The metrics against those that a reader would take instead: torchmetrics."""

import pytest
import torch

from helpers.metrics import LMAccuracy, LMCrossEntropyLoss, StreamingMetrics

torchmetrics = pytest.importorskip("torchmetrics.classification")
text = pytest.importorskip("torchmetrics.text")


def batches():
    generator = torch.Generator().manual_seed(0)
    for rows in (1, 7, 64):
        logits = torch.randn(rows, 5, 11, generator=generator)
        yield logits, torch.randint(0, 11, (rows, 5), generator=generator)


def test_accuracy_and_loss_are_torchmetrics():
    ours, theirs = LMAccuracy(pad_id=3), torchmetrics.MulticlassAccuracy(11, average="micro", ignore_index=3)
    perplexity = text.Perplexity(ignore_index=3)
    losses, tokens = 0.0, 0
    for logits, targets in batches():
        ours.update(logits, targets)
        theirs.update(logits.flatten(0, 1), targets.flatten())
        perplexity.update(logits, targets)
        real = (targets != 3).sum().item()
        losses, tokens = losses + LMCrossEntropyLoss(pad_id=3)(logits, targets).item() * real, tokens + real
    assert ours.compute() == pytest.approx(theirs.compute().item())
    assert losses / tokens == pytest.approx(perplexity.compute().log().item(), rel=1e-5)


def test_macro_f1_is_torchmetrics():
    ours, theirs = StreamingMetrics(11), torchmetrics.MulticlassF1Score(11, average="macro")
    for logits, targets in batches():
        ours.update(logits.flatten(0, 1), targets.flatten())
        theirs.update(logits.flatten(0, 1), targets.flatten())
    assert ours.compute()["macro_f1"] == pytest.approx(theirs.compute().item())
