"""Photos of clothes: metrics by class, weights of the loss, and that something is learned."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from helpers.metrics import StreamingMetrics
from helpers.training import CLOTHES
from helpers.training.clothes import class_weights
from helpers.training.slow_parts import CollectedMetrics

SLOW = frozenset()


@pytest.mark.parametrize("fixes", [SLOW, CLOTHES.fixed], ids=["slow", "fixed"])
def test_a_run_says_what_it_took_and_what_was_learned(fixes):
    result = CLOTHES.run(fixes, epochs=2)
    assert (result["steps"], result["n"]) == (8, 4)
    assert result["source"] == "generated garments 100×133, 4 classes, seed 0"
    assert result["images_per_s"] == pytest.approx(16e3 / result["iteration_mean_ms"])
    assert result["validation_accuracy"] * 32 == pytest.approx(round(result["validation_accuracy"] * 32))


def test_a_photo_teaches_the_model_what_garment_it_shows():
    result = CLOTHES.run(
        CLOTHES.fixed - {"bf16"},
        classes=3,
        samples=180,
        validation_samples=90,
        epochs=12,
        learning_rate=2e-3,
        dropout=0.0,
    )
    assert result["validation_accuracy"] > 0.5  # by chance 0.33


# Metrics


@settings(max_examples=20, deadline=None)
@given(data=st.data(), classes=st.integers(2, 6), count=st.integers(1, 40))
def test_both_metrics_are_accuracy_and_f1_by_their_definition(data, classes, count):
    draw = st.lists(st.integers(0, classes - 1), min_size=count, max_size=count)
    labels, predicted = (torch.tensor(data.draw(draw)) for _ in range(2))
    logits = torch.nn.functional.one_hot(predicted, classes).float()
    scores = []
    for at in set(labels.tolist()) | set(predicted.tolist()):
        precision = ((labels == at) & (predicted == at)).sum() / max((predicted == at).sum(), 1)
        recall = ((labels == at) & (predicted == at)).sum() / max((labels == at).sum(), 1)
        scores.append(float(2 * precision * recall / max(precision + recall, 1e-9)))
    expected = {"accuracy": (labels == predicted).float().mean().item(), "macro_f1": np.mean(scores)}
    for metrics in (CollectedMetrics(classes), StreamingMetrics(classes)):
        for part in torch.arange(count).split(7):
            metrics.update(logits[part], labels[part])
        assert metrics.compute() == pytest.approx(expected, abs=1e-6)
        metrics.reset()
        assert np.isnan(metrics.compute()["accuracy"])


@settings(max_examples=30, deadline=None)
@given(labels=st.lists(st.integers(0, 4), min_size=1, max_size=50))
def test_class_weights_make_every_class_count_alike(labels):
    labels = np.array(labels)
    weights = class_weights(labels, 5, torch.device("cpu")).numpy()
    totals = [weights[at] * (labels == at).sum() for at in set(labels.tolist())]
    np.testing.assert_allclose(totals, totals[0], rtol=1e-5)
    np.testing.assert_allclose(weights[labels].mean(), 1, rtol=1e-5)
