from importlib import import_module
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from helpers.chapters.pipelines.metrics_cost import VARIANTS, Metric, metrics_cost, random_batches
from helpers.lab import Disagreement
from helpers.lab.machine import missing_because

MODULE = import_module("helpers.chapters.pipelines.metrics_cost")

USABLE = [name for name, (_, needs) in VARIANTS.items() if not missing_because(*needs)]
CPU = torch.device("cpu")


def scores(variant, batches, classes):
    metric = VARIANTS[variant][0](classes, CPU)
    for logits, labels in batches:
        metric.step(logits, labels)
    return metric.compute()


def by_hand(batches):
    """Accuracy, and the mean F1 of the classes that were asked for or answered."""
    answers = torch.cat([logits.argmax(1) for logits, _ in batches])
    labels = torch.cat([labels for _, labels in batches])
    f1 = []
    for at in sorted({*answers.tolist(), *labels.tolist()}):
        right = ((answers == at) & (labels == at)).sum().item()
        f1.append(2 * right / ((answers == at).sum() + (labels == at).sum()).item())
    return {"accuracy": (answers == labels).double().mean().item(), "macro_f1": np.mean(f1)}


@pytest.mark.parametrize("variant", USABLE)
@settings(deadline=None, max_examples=8)
@given(st.integers(1, 4), st.integers(1, 20), st.integers(2, 9), st.integers(0, 99))
def test_every_variant_gives_the_same_accuracy_and_macro_f1(variant, count, batch, classes, seed):
    """Also where a class is never asked for, or never answered, or neither."""
    batches = random_batches(count, batch, classes, CPU, seed)
    actual, expected = scores(variant, batches, classes), by_hand(batches)
    assert actual.keys() == expected.keys()
    for name in expected:
        assert actual[name] == pytest.approx(expected[name], abs=1e-6)


@pytest.mark.skipif("scikit-learn, each step" not in USABLE, reason="scikit-learn is not installed")
def test_a_metric_that_is_asked_at_each_step_answers_about_everything_so_far():
    batches = random_batches(3, 8, 4, CPU)
    metric = VARIANTS["scikit-learn, each step"][0](4, CPU)
    for seen, pair in enumerate(batches, 1):
        actual = metric.step(*pair)
        assert actual == pytest.approx(by_hand(batches[:seen]))


def test_every_variant_has_a_row_for_each_group_of_steps(monkeypatch):
    monkeypatch.setattr(MODULE, "GROUPS", 3)
    rows = metrics_cost.measure(6, 8, 3)
    assert [(row["step"], row["variant"]) for row in rows] == [(step, name) for name in USABLE for step in (2, 4, 6)]
    assert all(row["ms"] > 0 for row in rows)
    assert all(row["until_s"] <= later["until_s"] for row, later in pairwise(rows) if row["step"] < later["step"])


def test_a_metric_with_other_scores_is_not_let_through(monkeypatch):
    scores = {"accuracy": float("nan"), "macro_f1": 1.0}
    monkeypatch.setitem(VARIANTS, "wrong", (lambda *_: Metric(lambda *_: None, lambda: scores), ()))
    with pytest.raises(Disagreement, match="'wrong' has accuracy nan, 'confusion matrix'"):
        metrics_cost.measure(2, 8, 3)


def test_without_their_packages_metrics_are_left_out(monkeypatch):
    monkeypatch.setattr("helpers.lab.machine.installed", lambda package: None)
    assert {row["variant"] for row in metrics_cost.measure(1, 4, 3)} == {"confusion matrix"}
