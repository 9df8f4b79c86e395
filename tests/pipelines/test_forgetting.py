"""The tracker against a loop in plain Python, one presentation after another."""

import itertools

import forgetting_cases
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from helpers.distributed.launch import launch
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


@settings(deadline=None)
@given(batches)
def test_equals_a_loop_over_presentations_with_repeats_in_their_order(parts):
    tracker, seen = tracked(parts), histories(*parts)
    assert tracker.counts().tolist() == [forgotten(history) for history in seen]
    assert tracker.presentations().tolist() == [len(history) for history in seen]
    assert tracker.learned().tolist() == [any(history) for history in seen]
    assert tracker.first_learned().tolist() == [history.index(True) + 1 if any(history) else 0 for history in seen]
    unforgettable = [i for i, history in enumerate(seen) if any(history) and not forgotten(history)]
    assert tracker.unforgettable().tolist() == unforgettable


@settings(deadline=None)
@given(st.lists(presentation, max_size=30), st.integers(1, 30))
def test_it_is_all_one_how_presentations_are_cut_into_batches(presentations, size):
    whole = tracked([presentations])
    cut = tracked([presentations[at : at + size] for at in range(0, len(presentations), size)])
    assert same(whole, cut)


@settings(deadline=None)
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


@settings(deadline=None)
@given(st.integers(1, 200), st.integers(0, 100))
def test_what_is_kept_and_what_is_dropped_are_everything(samples, percent):
    tracker = ForgettingTracker(samples)
    indices = torch.arange(samples)
    for step in range(3):
        tracker.update(indices, (indices * 7 + step) % 3 > 0)
    share = percent / 100
    dropped, kept = tracker.drop(share, seed=1), tracker.keep(1 - share, seed=1)
    assert torch.equal(torch.cat([dropped, kept]), tracker.ranking(seed=1))
    assert abs(len(dropped) - share * samples) <= 0.5 + 1e-6


@settings(deadline=None, max_examples=50)
@given(st.lists(st.tuples(st.permutations(range(SAMPLES)), st.lists(st.booleans(), min_size=SAMPLES)), max_size=5))
def test_merged_after_each_epoch_is_exact_though_samples_move_between_trackers(epochs):
    parts, trackers = [], [ForgettingTracker(SAMPLES) for _ in range(2)]
    for order, correct in epochs:
        presented = [(index, correct[index]) for index in order]
        parts.append(presented)
        for rank, tracker in enumerate(trackers):
            present(tracker, presented[rank::2])
        assert trackers[0].merge(trackers[1]) == 0
        trackers[1].load_state_dict(trackers[0].state_dict())
    assert same(trackers[0], tracked(parts))


def test_merged_once_at_the_end_misses_what_happened_between_trackers():
    a, b = ForgettingTracker(1), ForgettingTracker(1)
    for tracker, correct in ((a, True), (b, False), (a, True), (b, False)):  # forgotten twice
        present(tracker, [(0, correct)])
    assert a.merge(b) == 1  # and says that it doesn't know the order of one sample
    assert a.counts().tolist() == [0]


def test_a_sample_on_two_trackers_at_once_was_right_if_it_was_so_on_both():
    for right_on_both in (True, False):
        a, b = ForgettingTracker(2), ForgettingTracker(2)
        present(a, [(0, True), (1, True)])
        present(b, [(0, right_on_both)])
        assert a.merge(b) == 1
        assert a.presentations().tolist() == [2, 1]
        present(a, [(0, False), (1, True)])
        assert a.counts().tolist() == [int(right_on_both), 0]


def test_ranks_together_count_what_one_process_counts():
    alone = ForgettingTracker(forgetting_cases.SAMPLES)
    for order, correct in forgetting_cases.epochs():
        alone.update(order, correct[order])
    assert alone.counts().sum() > 10
    for state, unordered in launch(forgetting_cases.counted_by_ranks, forgetting_cases.RANKS):
        assert state == alone.state_dict()["state"].tolist()
        assert unordered == 0


def test_one_rank_without_a_process_group_needs_no_other_loop():
    parts = [[(0, True), (1, False)], [(0, False), (1, True)]]
    tracker = ForgettingTracker(SAMPLES)
    for part in parts:
        present(tracker, part)
        assert tracker.all_reduce() == 0
    assert same(tracker, tracked(parts))


@settings(deadline=None, max_examples=30)
@given(batches, batches)
def test_goes_on_from_a_saved_state(before, after):
    saved = tracked(before).state_dict()
    other = ForgettingTracker(SAMPLES)
    other.load_state_dict(saved)
    assert same(tracked(after, other), tracked(before + after))


def test_a_saved_state_does_not_change_when_the_tracker_goes_on():
    tracker = tracked([[(0, True)]])
    saved = tracker.state_dict()
    present(tracker, [(0, False)])
    assert not torch.equal(saved["state"], tracker.state_dict()["state"])


def test_logits_are_right_where_the_largest_is_the_labels_and_none_is_nan():
    logits = torch.tensor([[1.0, 3.0], [1.0, 3.0], [float("nan"), 3.0], [float("nan"), 0.0], [float("inf"), 0.0]])
    labels = torch.tensor([1, 0, 1, 0, 0])
    assert is_correct(logits, labels).tolist() == [True, False, False, False, True]
    by_logits, by_correct = ForgettingTracker(SAMPLES), ForgettingTracker(SAMPLES)
    by_logits.update(torch.arange(5), logits=logits.requires_grad_(), labels=labels)
    by_correct.update(torch.arange(5), is_correct(logits, labels))
    assert same(by_logits, by_correct)


def test_holds_16_bytes_a_sample_and_a_step_is_few_operations_whatever_the_batch():
    class Counted(TorchDispatchMode):
        operations = 0

        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            self.operations += not function.is_view
            return function(*args, **(kwargs or {}))

    tracker = ForgettingTracker(1000)
    assert tracker.state_dict()["state"].nbytes == 16 * 1001
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
        ((torch.tensor([0, 5]), CORRECT), "index 5 is out of range; it must be from 0 to 4"),
        ((torch.tensor([-1, 0]), CORRECT), "index -1 is out of range"),
        ((INDICES.float(), CORRECT), r"indices are float32 of shape \(2,\); they must be integers of shape \(B,\)"),
        ((INDICES[None], CORRECT[None]), r"indices are int64 of shape \(1, 2\)"),
        ((CORRECT, CORRECT), "indices are bool"),
        ((INDICES, CORRECT[:1]), r"correct is bool of shape \(1,\); it must be bool of shape \(2,\)"),
        ((INDICES, CORRECT.float()), "correct is float32"),
        ((INDICES,), "either correct, or logits and labels"),
    ],
)
def test_bad_input_is_refused_and_counts_nothing(arguments, message):
    tracker = ForgettingTracker(SAMPLES)
    with pytest.raises(ValueError, match=message):
        tracker.update(*arguments)
    assert same(tracker, ForgettingTracker(SAMPLES))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"logits": torch.zeros(2, 3)}, "either correct, or logits and labels"),
        ({"logits": torch.zeros(2, 3), "labels": INDICES, "correct": CORRECT}, "either correct"),
        ({"correct": CORRECT, "labels": INDICES}, "either correct"),
        ({"logits": torch.zeros(2), "labels": INDICES}, r"logits are float32 of shape \(2,\)"),
        ({"logits": torch.zeros(2, 3), "labels": INDICES[:1]}, r"labels int64 of shape \(1,\)"),
    ],
)
def test_logits_and_labels_go_together(arguments, message):
    with pytest.raises(ValueError, match=message):
        ForgettingTracker(SAMPLES).update(INDICES, **arguments)


def test_trackers_that_do_not_belong_together_are_refused():
    tracker = tracked([[(0, True)]])
    with pytest.raises(ValueError, match="a tracker of 4 samples can't be merged into one of 5"):
        tracker.merge(ForgettingTracker(4))
    tracker.merge()
    with pytest.raises(ValueError, match="went on from the same state"):
        tracker.merge(ForgettingTracker(SAMPLES))
    with pytest.raises(ValueError, match="the state is of 4 samples; this tracker has 5"):
        tracker.load_state_dict(ForgettingTracker(4).state_dict())
    with pytest.raises(ValueError, match="no 'base'"):
        tracker.load_state_dict({"state": tracker.state_dict()["state"]})


@pytest.mark.parametrize("samples", [0, -1, 2.0, True, 2**31])
def test_a_number_of_samples_is_a_whole_number(samples):
    with pytest.raises(ValueError, match="samples is"):
        ForgettingTracker(samples)


@pytest.mark.parametrize("share", [-0.1, 1.1, float("nan")])
def test_a_share_is_from_0_to_1(share):
    for method in (ForgettingTracker(SAMPLES).keep, ForgettingTracker(SAMPLES).drop):
        with pytest.raises(ValueError, match="share is"):
            method(share)
