"""The balanced sampler: every index once, spread at most k, full batches, any number of ranks, exact resumption."""

import functools
import itertools

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader

from helpers.batching import BalancedBatchSampler, StandardDataset, collate_fn
from helpers.batching.sampler import permuted
from helpers.text import SyntheticText

tails = st.one_of(st.integers(0, 12), st.integers(0, 700), st.integers(0, 10**6))
length_lists = st.one_of(
    st.lists(tails, min_size=1, max_size=200),
    st.builds(lambda length, n: [length] * n, st.integers(0, 5000), st.integers(1, 200)),
)
spreads = st.sampled_from([0, 1, 5, 50, 640, 10**7])


def spread(lengths, batch):
    return max(lengths[i] for i in batch) - min(lengths[i] for i in batch)


def cut(lengths, batch_size, k):
    """How many batches cutting the sorted samples makes."""
    rest, batches = sorted(lengths), 0
    while rest:
        taken = [length for length in rest[:batch_size] if length <= rest[0] + k]
        rest, batches = rest[len(taken) :], batches + 1
    return batches


@functools.cache
def wikitext_like(n: int) -> np.ndarray:
    return np.resize(np.minimum(SyntheticText(min(n, 100_000), 0).lengths, 640), n)


@given(length_lists, st.integers(1, 40), spreads)
@settings(max_examples=40, deadline=None)
def test_no_more_batches_than_cutting_the_sorted_samples_would_give_and_one(lengths, batch_size, k):
    for epoch in range(3):
        sampler = BalancedBatchSampler(lengths, batch_size, k)
        sampler.set_epoch(epoch)
        assert len(sampler) <= cut(lengths, batch_size, k) + 1


@given(length_lists, st.integers(1, 40), spreads, st.integers(0, 3), st.integers(1, 8))
@settings(max_examples=80, deadline=None)
@example([0, 1, 3, 4], 10, 1, 1, 3)  # three batches in its first epoch, two in its second
def test_in_each_epoch_every_index_comes_once_over_all_ranks_and_no_batch_spreads_beyond_k(
    lengths, batch_size, k, seed, world_size
):
    def of_ranks(count):
        return [BalancedBatchSampler(lengths, batch_size, k, seed, rank=r, world_size=count) for r in range(count)]

    try:
        samplers = of_ranks(world_size)
    except ValueError:
        fewest = cut(lengths, batch_size, k)
        assert any(n < world_size or -(-n // world_size) * world_size > len(lengths) for n in (fewest, fewest + 1))
        samplers = of_ranks(1)
    for epoch in range(3):
        shares = []
        for sampler in samplers:
            sampler.set_epoch(epoch)
            shares.append(list(sampler))
        assert {len(share) for share in shares} == {len(samplers[0])}
        batches = [batch for share in shares for batch in share]
        assert sorted(i for batch in batches for i in batch) == list(range(len(lengths)))
        assert all(1 <= len(batch) <= batch_size and spread(lengths, batch) <= k for batch in batches)


def test_in_a_step_all_ranks_get_batches_of_neighbouring_lengths():
    lengths = wikitext_like(5000)
    ranks = [list(BalancedBatchSampler(lengths, 16, 5, rank=r, world_size=4)) for r in range(4)]
    apart = [np.ptp([max(lengths[i] for i in batch) for batch in step]) for step in zip(*ranks, strict=True)]
    assert np.mean(apart) < 5


@pytest.mark.parametrize("size", [2, 10, 33])
def test_permutations_are_random_enough(size):
    """Where two indices go, over 20,000 keys: every pair of places about equally often."""
    keys = np.random.default_rng(0).integers(2**32, size=20_000).astype(np.uint32)
    first, last = (permuted(np.full_like(keys, i), np.full_like(keys, size), keys) for i in (0, size - 1))
    pairs = np.bincount((first * np.uint32(size) + last).astype(int), minlength=size**2).reshape(size, size)
    assert np.diag(pairs).sum() == 0
    cells = size * (size - 1)
    squared = ((pairs - 20_000 / cells) ** 2 / (20_000 / cells))[~np.eye(size, dtype=bool)].sum()
    freedom = cells - 1  # of a chi-squared variable, with deviation √(2·freedom)
    assert squared < freedom + 4.5 * (2 * freedom) ** 0.5


def test_the_order_depends_on_seed_and_epoch_only():
    lengths = wikitext_like(2000)
    first, again, other = (BalancedBatchSampler(lengths, 8, 5, seed) for seed in (1, 1, 2))
    epochs = []
    for epoch in (0, 1):
        first.set_epoch(epoch)
        epochs.append(list(first))
    assert epochs[0] != epochs[1]
    assert list(first) == epochs[1]  # an epoch doesn't advance by itself
    assert list(again) == epochs[0] != list(other)
    again.set_epoch(1)
    assert list(again) == epochs[1]


def test_with_k_as_wide_as_the_lengths_batches_are_those_of_random_order():
    lengths = wikitext_like(3200)
    batches = list(BalancedBatchSampler(lengths, 32, 640))
    assert [len(batch) for batch in batches] == [32] * 100
    shuffled = np.random.default_rng(0).permutation(lengths).reshape(100, 32)
    drawn = np.array([lengths[batch] for batch in batches])
    assert drawn.max(axis=1).mean() == pytest.approx(shuffled.max(axis=1).mean(), rel=0.05)
    assert drawn.mean(axis=1).std() == pytest.approx(lengths.std() / 32**0.5, rel=0.25)


def test_samples_meet_others_in_each_epoch():
    sampler = BalancedBatchSampler([7] * 100, 10, 0)
    met = set()
    for epoch in range(60):
        sampler.set_epoch(epoch)
        met |= {j for batch in sampler if 0 in batch for j in batch}
    assert len(met) > 95


def test_on_wikitext_lengths_batches_are_full():
    assert 20_000 / (len(BalancedBatchSampler(wikitext_like(20_000), 32, 5)) * 32) >= 0.95


@given(st.integers(0, 40), st.integers(1, 3), st.integers(0, 2))
@settings(max_examples=20, deadline=None)
def test_a_pass_resumes_where_it_was(done, world_size, epoch):
    def make():
        return BalancedBatchSampler(wikitext_like(700), 8, 20, rank=0, world_size=world_size)

    complete, sampler, resumed = make(), make(), make()
    for item in (complete, sampler):
        item.set_epoch(epoch)
    whole, batches = list(complete), iter(sampler)
    begun = list(itertools.islice(batches, min(done, len(whole) - 1)))
    resumed.load_state_dict(sampler.state_dict())
    resumed.set_epoch(resumed.epoch)  # as a training loop does; the same epoch keeps its place
    assert begun + list(resumed) == whole
    assert begun + list(batches) == whole


def test_a_loader_resumes_after_any_of_its_batches():
    dataset = StandardDataset(SyntheticText(60, 0))
    sampler, resumed = (BalancedBatchSampler(dataset.lengths, 8, 20) for _ in range(2))
    loader = DataLoader(dataset, batch_sampler=sampler, collate_fn=collate_fn, num_workers=2)
    whole = list(resumed)
    for steps, tokens in enumerate(loader, start=1):  # workers end the sampler's pass before the loader's
        indices = whole[steps - 1]
        assert tokens.shape == (len(indices), max(dataset.lengths[i] for i in indices))
        resumed.load_state_dict(sampler.state_dict() | {"position": steps})
        assert list(resumed) == whole[steps:]
        assert list(resumed) == whole


@pytest.mark.parametrize("workers", [0, 2])
def test_a_resumed_sampler_goes_on_in_a_loader(workers):
    sampler, resumed = (BalancedBatchSampler([1] * 40, 4, 0) for _ in range(2))
    whole = list(sampler)
    resumed.load_state_dict(sampler.state_dict() | {"position": 3})
    loader = DataLoader(range(40), batch_sampler=resumed, collate_fn=list, num_workers=workers)
    assert list(loader) == whole[3:]
    assert list(loader) == whole


def test_states_of_other_samplers_and_places_that_an_epoch_does_not_have_are_refused():
    sampler = BalancedBatchSampler([1, 2, 3], 2, 5)
    with pytest.raises(ValueError, match="position is 3; epoch 7 has 2 batches"):
        sampler.load_state_dict(sampler.state_dict() | {"epoch": 7, "position": 3})
    with pytest.raises(ValueError, match="epoch is None; it must be an integer"):
        sampler.load_state_dict({name: value for name, value in sampler.state_dict().items() if name != "epoch"})
    assert sampler.epoch == 0
    for other, differs in (([1, 2], 2, 0), "k, lengths"), (([3, 2, 1], 2, 5), "lengths"):
        with pytest.raises(ValueError, match=f"it differs in {differs}$"):
            BalancedBatchSampler(*other).load_state_dict(sampler.state_dict())


def test_a_pass_that_had_ended_leaves_the_epoch_that_was_set():
    """`StatefulDataLoader` loads a state when it is iterated, after `set_epoch`, and then iterates anew."""
    sampler, resumed = (BalancedBatchSampler(wikitext_like(100), 8, 20) for _ in range(2))
    list(sampler)
    resumed.set_epoch(1)
    resumed.load_state_dict(sampler.state_dict())
    assert list(resumed) == []
    sampler.set_epoch(1)
    assert list(resumed) == list(sampler)


@pytest.mark.parametrize("kind", [list, tuple, torch.tensor, lambda x: np.array(x, dtype=np.uint64)])
def test_lengths_are_any_whole_numbers(kind):
    assert sorted(next(iter(BalancedBatchSampler(kind([5, 2, 900]), 8, 10**30)))) == [0, 1, 2]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (([1, -3], 2, 1), "length 1 is -3; lengths must be whole numbers"),
        (([1, 2.5], 2, 1), "lengths are float64 of shape .*; they must be whole numbers"),
        (([], 2, 1), "there are 0 samples"),
        (([1], 0, 1), "batch_size is 0; it must be an integer of at least 1"),
        (([1], 2, -1), "k is -1; it must be an integer of at least 0"),
        (([1, 1, 9, 9], 2, 0, 0, 4), "4 ranks for 2 batches; use fewer ranks"),
        (([1, 1], 1, 0, 2, 2), "rank is 2; of 2 ranks the last is 1"),
        (([1, 1, 1], 1, 0, 0, 2), "3 batches of single samples can't be shared equally by 2 ranks"),
    ],
)
def test_bad_input_is_named(arguments, message):
    lengths, batch_size, k, rank, world_size = (*arguments, None, None)[:5]
    with pytest.raises(ValueError, match=message):
        BalancedBatchSampler(lengths, batch_size, k, rank=rank, world_size=world_size)
