"""The tracker against a loop in plain Python, one presentation after another."""

import itertools
import threading
from concurrent.futures import ThreadPoolExecutor

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
    return torch.equal(a.state_dict()["state"], b.state_dict()["state"])


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


def test_ranks_together_count_what_one_process_counts(monkeypatch):
    """Two ranks, each a thread: what one gives to `all_reduce` is added to what the other gives."""
    given, met = {}, threading.Barrier(2, timeout=900)

    def all_reduce(tensor, group):
        given[threading.get_ident()] = tensor.clone()
        met.wait()
        tensor.copy_(sum(given.values()))
        met.wait()

    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "all_reduce", all_reduce)
    epochs = [(torch.randperm(23), torch.rand(23) < 0.5) for _ in range(6)]

    def counted(rank, ranks):
        tracker = ForgettingTracker(23)
        for order, correct in epochs:
            mine = order[rank::ranks]
            tracker.update(mine, correct[mine])
            if ranks > 1:
                tracker.all_reduce()
        return tracker

    alone = counted(0, 1)
    assert alone.counts().sum() > 10
    with ThreadPoolExecutor(2) as pool:
        assert all(same(tracker, alone) for tracker in pool.map(counted, (0, 1), (2, 2)))


def test_one_rank_without_a_process_group_needs_no_other_loop():
    parts = [[(0, True), (1, False)], [(0, False), (1, True)]]
    tracker = ForgettingTracker(SAMPLES)
    for part in parts:
        present(tracker, part)
        tracker.all_reduce()
    assert same(tracker, tracked(parts))


@settings(deadline=None, max_examples=15)
@given(batches, batches)
def test_goes_on_from_a_saved_state(before, after):
    tracker, other = tracked(before), ForgettingTracker(SAMPLES)
    saved = tracker.state_dict()
    tracked(after, tracker)  # which leaves the state as it was saved
    other.load_state_dict(saved)
    assert same(tracked(after, other), tracked(before + after))


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
    assert tracker.state_dict()["state"].nbytes == 16 * 1000
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


def test_wrong_states_and_shares_are_named():
    with pytest.raises(ValueError, match="the state is of 4 samples; this tracker has 5"):
        ForgettingTracker(SAMPLES).load_state_dict(ForgettingTracker(4).state_dict())
    for share in (-0.1, 1.1, float("nan")):
        with pytest.raises(ValueError, match="share is"):
            ForgettingTracker(SAMPLES).keep(share)
