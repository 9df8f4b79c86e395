"""What leaving out samples costs, measured on digits."""

from importlib import import_module

import pytest
import torch

from helpers.chapters.pipelines.forgetting import LEAST, MOST, RANDOM, forgetting, generator, selected, split, train
from helpers.pipelines.forgetting import PRESENTED, ForgettingTracker

MODULE = import_module("helpers.chapters.pipelines.forgetting")

pytest.importorskip("sklearn")
CPU = torch.device("cpu")
CACHED = (MODULE._tracked, MODULE._on_everything, MODULE._parts)


@pytest.fixture(autouse=True, scope="module")
def _short_trainings_on_the_cpu():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(MODULE, "device", lambda: CPU)
        patch.setattr(MODULE, "EPOCHS", 4)
        yield
    for cached in CACHED:
        cached.cache_clear()


def digits(seed=0):
    return split(seed, CPU)


def test_a_seeds_split_has_every_sample_once_and_a_third_of_each_class_for_the_test():
    parts = digits()
    assert len(parts.labels) + len(parts.test_labels) == 1797
    both = torch.bincount(parts.labels) + torch.bincount(parts.test_labels)
    assert ((torch.bincount(parts.test_labels) - both / 3).abs() <= 1).all()
    train_images, test_images = ({image.numpy().tobytes() for image in i} for i in (parts.images, parts.test_images))
    assert not train_images & test_images  # no two digits are the same
    assert abs(parts.images.mean()) < 1e-5 and abs(parts.images.std() - 1) < 1e-5
    assert torch.equal(parts.labels, digits().labels) and not torch.equal(parts.labels, digits(1).labels)


def test_without_its_data_a_table_says_what_is_not_installed(monkeypatch):
    monkeypatch.setattr("helpers.lab.machine.installed", lambda peer: None)
    assert set(MODULE.forgetting("small")["status"]) == {"not installed: scikit-learn"}


def tracker_of_four():
    """Forgotten 0, 1, 2 times, and never learned."""
    tracker = ForgettingTracker(4)
    for correct in ([1, 1, 1, 0], [1, 0, 0, 0], [1, 1, 1, 0], [1, 1, 0, 0]):
        tracker.update(torch.arange(4), torch.tensor(correct, dtype=torch.bool))
    return tracker


def test_each_variant_leaves_out_what_its_name_says():
    tracker = tracker_of_four()
    assert selected(tracker, LEAST, 0.5, 0).tolist() == [2, 3]
    assert selected(tracker, MOST, 0.5, 0).tolist() == [0, 1]
    by_chance = {tuple(selected(tracker, RANDOM, 0.5, seed).tolist()) for seed in range(40)}
    assert len(by_chance) == 6  # of four samples, every two


def test_a_seed_gives_the_same_row_and_another_one_another():
    rows = []
    for seed in (5, 5, 6):
        for cached in CACHED:
            cached.cache_clear()
        rows.append(forgetting.measure(RANDOM, 0.5, "epochs", seed))
    assert rows[0] == rows[1]
    assert rows[0]["test_accuracy"] != rows[2]["test_accuracy"]


def test_tracking_presents_each_kept_sample_once_an_epoch_and_changes_neither_training_nor_others_random_numbers():
    parts, before = digits(), torch.get_rng_state()
    tracker, remaining = ForgettingTracker(len(parts.labels)), torch.arange(0, len(parts.labels), 2)
    watched = train(parts, 1, remaining=remaining, tracker=tracker)
    assert train(parts, 1, remaining=remaining)["test_accuracy"] == watched["test_accuracy"]
    assert torch.equal(torch.get_rng_state(), before)
    presented = torch.zeros(len(parts.labels), dtype=torch.int64)
    presented[remaining] = MODULE.EPOCHS
    assert torch.equal(tracker._state[:, PRESENTED].long(), presented)


def test_a_budget_of_steps_trains_for_as_many_steps_as_on_everything():
    rows = {budget: forgetting.measure(RANDOM, 0.5, budget, 0) for budget in ("epochs", "steps")}
    whole = forgetting.measure(RANDOM, 0.0, "epochs", 0)
    assert whole["lost_points"] == 0
    assert whole["test_accuracy"] > 0.9
    assert rows["steps"]["steps"] == whole["steps"] == 4 * 19
    assert rows["epochs"]["steps"] == 4 * 10
    for row in rows.values():
        assert row["lost_points"] == pytest.approx(100 * (whole["test_accuracy"] - row["test_accuracy"]))


def test_purposes_draw_apart():
    """Of 1,000 samples, 100 drawn twice have about 10 in common: not all, and not none."""
    purposes = ("split", "left out", "ties", "first training", "second training")
    drawn = [set(torch.randperm(1000, generator=generator(0, purpose))[:100].tolist()) for purpose in purposes]
    common = [len(a & b) for at, a in enumerate(drawn) for b in drawn[:at]]
    assert min(common) > 0 and max(common) < 25
    tracker = ForgettingTracker(1000)  # which knows nothing, so that ties decide
    least, by_chance = (set(selected(tracker, variant, 0.5, 0).tolist()) for variant in (LEAST, RANDOM))
    assert 200 < len(least & by_chance) < 300
