"""The tracker against a loop in plain Python, one presentation after another."""

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from helpers.pipelines.forgetting import ForgettingTracker, is_correct

SAMPLES = 5
presentation = st.tuples(st.integers(0, SAMPLES - 1), st.booleans())
batches = st.lists(st.lists(presentation, max_size=12), max_size=6)


def histories(*parts):
    """What each sample's presentations were, in order."""
    by_sample = {index: [] for index in range(SAMPLES)}
    for batch in parts:
        for index, correct in batch:
            by_sample[index].append(correct)
    return list(by_sample.values())


def forgotten(history):
    return sum(a and not b for a, b in itertools.pairwise(history))


def tracked(parts, tracker=None):
    tracker = tracker or ForgettingTracker(SAMPLES)
    for batch in parts:
        present(tracker, batch)
    return tracker


def present(tracker, batch):
    indices = torch.tensor([index for index, _ in batch], dtype=torch.int64)
    tracker.update(indices, torch.tensor([correct for _, correct in batch], dtype=torch.bool))


def same(a, b):
    return torch.equal(a._state, b._state)


@settings(deadline=None, max_examples=30)
@given(batches)
def test_equals_a_loop_over_presentations_with_repeats_in_their_order(parts):
    tracker, seen = tracked(parts), histories(*parts)
    assert tracker.counts().tolist() == [forgotten(history) for history in seen]
    assert tracker.learned().tolist() == [any(history) for history in seen]
    unforgettable = [i for i, history in enumerate(seen) if any(history) and not forgotten(history)]
    assert tracker.unforgettable().tolist() == unforgettable


@settings(deadline=None, max_examples=30)
@given(batches, st.integers(0, 3))
def test_ranks_from_never_forgotten_to_never_learned(parts, seed):
    seen = histories(*parts)
    order = tracked(parts).ranking(seed).tolist()
    assert sorted(order) == list(range(SAMPLES))
    keys = [forgotten(seen[i]) if any(seen[i]) else 1000 for i in order]
    assert keys == sorted(keys)


def test_among_equals_chance_decides_by_seed():
    tracker = ForgettingTracker(1000)
    tracker.update(torch.arange(1000), torch.ones(1000, dtype=torch.bool))
    orders = [tracker.ranking(seed) for seed in range(40)]
    assert torch.equal(orders[0], tracker.ranking(0))
    # Each index has the same chance of being in the dropped half: 500 of 1000, give or take.
    dropped = sum((order[:500] < 500).sum().item() for order in orders) / (40 * 500)
    assert abs(dropped - 0.5) < 0.03
    first = torch.stack([order[:100] for order in orders])
    assert len(first.unique()) > 950


@settings(deadline=None, max_examples=30)
@given(st.integers(1, 200), st.integers(0, 100))
def test_a_share_is_kept_of_the_most_forgotten(samples, percent):
    tracker = ForgettingTracker(samples)
    indices = torch.arange(samples)
    for step in range(3):
        tracker.update(indices, (indices * 7 + step) % 3 > 0)
    share = percent / 100
    kept = tracker.keep(share, seed=1)
    assert torch.equal(kept, tracker.ranking(seed=1)[samples - len(kept) :])
    assert abs(len(kept) - share * samples) <= 0.5 + 1e-6


def test_logits_are_right_where_the_largest_is_the_labels_and_none_is_nan():
    logits = torch.tensor([[1.0, 3.0], [1.0, 3.0], [float("nan"), 3.0], [float("nan"), 0.0], [float("inf"), 0.0]])
    labels = torch.tensor([1, 0, 1, 0, 0])
    assert is_correct(logits, labels).tolist() == [True, False, False, False, True]


def test_holds_few_bytes_a_sample_and_a_step_is_few_operations_whatever_the_batch():
    class Counted(TorchDispatchMode):
        operations = 0

        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            self.operations += not function.is_view
            return function(*args, **(kwargs or {}))

    tracker = ForgettingTracker(1000)
    assert tracker._state.nbytes == 16 * 1000
    steps = []
    for size in (2, 500):
        with Counted() as counted:
            tracker.update(torch.zeros(size, dtype=torch.int64), torch.ones(size, dtype=torch.bool))
        steps.append(counted.operations)
    assert steps[0] == steps[1] <= 30


INDICES, CORRECT = torch.tensor([0, 1]), torch.tensor([True, False])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"indices": INDICES[None], "correct": CORRECT[None]}, r"both are \(B,\), and correct is bool"),
        ({"correct": CORRECT[:1]}, r"both are \(B,\)"),
        ({"correct": INDICES}, r"both are \(B,\)"),
    ],
)
def test_bad_input_is_refused_and_counts_nothing(arguments, message):
    tracker = ForgettingTracker(SAMPLES)
    with pytest.raises(ValueError, match=message):
        tracker.update(**{"indices": INDICES} | arguments)
    assert same(tracker, ForgettingTracker(SAMPLES))


def test_wrong_shares_are_named():
    for share in (-0.1, 1.1, float("nan")):
        with pytest.raises(ValueError, match="share is"):
            ForgettingTracker(SAMPLES).keep(share)
