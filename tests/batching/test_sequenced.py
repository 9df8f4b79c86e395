import itertools

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from packed_cases import LENGTH_LISTS, MAX_LENGTH
from torch.utils.data import DataLoader

from helpers.batching import PackedLayout, SequencedDataset, StandardDataset
from helpers.batching.packed import PADDING, causal_mask
from helpers.batching.packing import STRATEGIES
from helpers.text import SyntheticText

SOME_LENGTHS = st.lists(st.integers(0, 40), min_size=1, max_size=8).filter(any)
CHOICES = [{"last": "carry"}, *({"strategy": strategy} for strategy in STRATEGIES)]


def numbered(lengths):
    """Samples in which no token occurs twice: the tokens of sample i are 1000·i + 1, 1000·i + 2, …"""
    return [np.arange(1, length + 1) + 1000 * index for index, length in enumerate(lengths)]


def parts(packed):
    """The documents of a packed sequence, as lists of tokens."""
    offsets = packed.offsets.tolist()
    return [packed.tokens[begin:end].tolist() for begin, end in itertools.pairwise(offsets)]


def as_lists(sequences):
    return [parts(packed) for packed in sequences]


@pytest.fixture(scope="module")
def text():
    return SyntheticText(400, vocab_size=500)


@pytest.mark.parametrize("choice", CHOICES, ids=lambda choice: next(iter(choice.values())))
@settings(deadline=None, max_examples=20)
@given(LENGTH_LISTS, st.integers(0, 3), st.integers(1, 6), st.booleans())
@example([0, 0, 0], 0, 1, False)
def test_every_sample_comes_whole_and_once_over_all_ranks(choice, lengths, epoch, ranks, fixed):
    ranks = min(ranks, len(lengths))
    result, counts = [], []
    for rank in range(ranks):
        dataset = SequencedDataset(
            numbered(lengths), None, MAX_LENGTH, **choice, fixed=fixed, rank=rank, world_size=ranks, pad_id=-7
        )
        dataset.set_epoch(epoch)
        sequences = list(dataset)
        assert len(dataset) == len(sequences)
        counts.append(len(sequences))
        for packed in sequences:
            check(packed, MAX_LENGTH if fixed else None)
            result += parts(packed)
    assert sorted(map(tuple, result)) == sorted(tuple(sample.tolist()) for sample in numbered(lengths))
    assert max(counts) - min(counts) <= 1


def check(packed, length):
    """Document ids, positions and padding, token by token."""
    expected = [(document, place) for document, part in enumerate(parts(packed)) for place in range(len(part))]
    assert len(expected) <= MAX_LENGTH
    padding = [(PADDING, 0)] * ((length or len(expected)) - len(expected))
    assert list(zip(packed.documents.tolist(), packed.positions.tolist(), strict=True)) == expected + padding
    assert packed.tokens[len(expected) :].tolist() == [-7] * len(padding)
    assert packed.offsets[0] == 0 and packed.offsets.dtype == torch.int32


@pytest.mark.parametrize("last", ["crop", "drop"])
@settings(deadline=None, max_examples=20)
@given(LENGTH_LISTS, st.none() | st.integers(1, 6))
def test_what_is_lost_is_cropped_or_dropped_as_asked(last, lengths, batch_size):
    if last == "crop":
        lengths = [2 * length for length in lengths]  # some are longer than a sequence
    dataset = SequencedDataset(numbered(lengths), batch_size, MAX_LENGTH, last=last)
    result = [part for packed in dataset for part in parts(packed)]
    parents = [part[0] // 1000 for part in result if part]
    assert len(set(parents)) == len(parents)
    for part in filter(None, result):
        sample = numbered(lengths)[part[0] // 1000].tolist()
        assert part == (sample if last == "drop" else sample[: len(part)])


def test_a_seed_and_an_epoch_are_one_order_of_equally_many_sequences_a_rank(text):
    def epoch(number, seed=0, **choice):
        dataset = SequencedDataset(text, None, 512, seed=seed, **choice)
        dataset.set_epoch(number)
        return as_lists(dataset)

    for choice in CHOICES:
        ranks = [SequencedDataset(text, None, 512, **choice, rank=rank, world_size=7) for rank in range(7)]
        assert len(set(map(len, ranks))) == 1
        assert epoch(0, **choice) == epoch(0, **choice)
        together = [{frozenset(map(tuple, sequence)) for sequence in epoch(number, **choice)} for number in (0, 1)]
        assert len(together[0] & together[1]) < 0.5 * len(together[0])
        assert epoch(0, **choice) != epoch(0, seed=1, **choice)


def test_a_corpus_lists_and_tensors_give_the_same(text):
    expected = as_lists(SequencedDataset(text, 8, 512))
    for samples in ([row.tolist() for row in text], [torch.tensor(row) for row in text], StandardDataset(text, 640)):
        assert as_lists(SequencedDataset(samples, 8, 512)) == expected
    assert max(map(len, expected)) == 8
    assert sorted(as_lists(SequencedDataset(text, 1, 512))) == sorted([row.tolist()] for row in text)


def test_workers_change_neither_the_sequences_nor_their_order(text):
    dataset = SequencedDataset(text, None, 512, fixed=True, rank=1, world_size=2)
    expected = list(dataset)
    result = list(DataLoader(dataset, batch_size=None, num_workers=2))
    assert len(result) == len(expected) == len(dataset)
    for ours, theirs in zip(result, expected, strict=True):
        assert type(ours) is type(theirs)
        assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


def test_set_epoch_reaches_spawned_workers_that_live_on(text):
    dataset = SequencedDataset([row.tolist() for row in text][:60], None, 512)
    options = {"num_workers": 1, "persistent_workers": True, "multiprocessing_context": "spawn"}
    loader = DataLoader(dataset, batch_size=None, **options)
    epochs = []
    for number in (0, 1, 0):
        dataset.set_epoch(number)
        epochs.append(as_lists(loader))
        assert epochs[-1] == as_lists(dataset)
    assert epochs[0] == epochs[2] != epochs[1]


def test_a_pass_keeps_the_epoch_it_began_with(text):
    dataset = SequencedDataset(text, None, 512)
    expected = as_lists(dataset)
    begun = iter(dataset)
    dataset.set_epoch(1)
    assert as_lists(begun) == expected != as_lists(dataset)


def test_a_loader_that_would_stack_batches_says_what_to_do(text):
    with pytest.raises(ValueError, match=r"DataLoader\(dataset, batch_size=None\)"):
        next(iter(DataLoader(SequencedDataset(text, None, 512, fixed=True), batch_size=2)))


def test_targets_are_the_next_tokens_of_the_same_document():
    [packed] = SequencedDataset(numbered([3, 1, 0, 2]), None, 9, strategy="greedy", fixed=True, pad_id=0)
    following = dict(zip(packed.tokens[:6].tolist(), packed.targets()[:6].tolist(), strict=True))
    assert following == {1: 2, 2: 3, 3: 0, 1001: 0, 3001: 3002, 3002: 0}
    assert packed.targets()[6:].tolist() == [0, 0, 0]
    assert packed.targets(-100)[packed.targets() == 0].unique().tolist() == [-100]


@given(st.lists(st.integers(0, 6), min_size=1, max_size=6), st.booleans())
@settings(deadline=None, max_examples=20)
def test_the_mask_is_causal_and_never_looks_across_documents(lengths, fixed):
    for packed in SequencedDataset(numbered(lengths), None, MAX_LENGTH, fixed=fixed):
        documents = list(enumerate(packed.documents.tolist()))
        expected = [[mine == other and key <= query for key, other in documents] for query, mine in documents]
        assert causal_mask(packed.documents).tolist() == expected
        assert {part.device.type for part in packed.to("meta")} == {"meta"}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (([], 4, 20), "there are no samples"),
        (([[1]], 0, 20), "batch_size is 0; it must be an integer of at least 1"),
        (([[1]], 4, 20, {"last": "keep"}), "last is 'keep'; valid: 'carry', 'crop', 'drop'"),
        (([[1]], None, 20, {"strategy": "worst"}), "strategy is 'worst'; valid: 'greedy', 'first-fit', 'best-fit'"),
        (([[1]], 4, 20, {"strategy": "best-fit"}), "batch_size is 4; it must be None with strategy='best-fit'"),
        (([[1]], None, 20, {"strategy": "best-fit", "last": "drop"}), "last is 'drop'; it must be 'carry'"),
        (([[1], [2] * 21], 4, 20), "sample 1 has 21 tokens and max_length is 20; .* last='crop'"),
        (([[1]], 4, 20, {"rank": 2, "world_size": 2}), "rank is 2; of 2 ranks the last is 1"),
        (([[1]], 4, 20, {"seed": -1}), "seed is -1"),
    ],
)
def test_wrong_arguments_are_named(arguments, message):
    samples, batch_size, max_length, options = (*arguments, {})[:4]
    with pytest.raises(ValueError, match=message):
        SequencedDataset(samples, batch_size, max_length, **options)


def test_what_shows_only_in_an_epoch_is_named_too():
    changed = [[1, 2, 3]]
    for samples, options, message in (
        (changed, {}, "sample 0 has 2 tokens, and had 3 at first"),
        ([[1, 2], [0.5, 1]], {}, "sample 1 is float64 of shape"),
        ([[1] * 12, [2] * 12], {"last": "drop", "world_size": 2}, "world_size is 2; there are only 1 sequences"),
    ):
        dataset = SequencedDataset(samples, None, 20, **options)
        changed[0] = [1, 2]
        with pytest.raises(ValueError, match=message):
            list(dataset)


@given(lengths=SOME_LENGTHS, padding=st.integers(0, 9))
@settings(deadline=None, max_examples=20)
def test_a_layout_knows_its_documents_of_which_the_padding_is_one(lengths, padding):
    layout = PackedLayout(torch.tensor([0, *itertools.accumulate(lengths)]), sum(lengths) + padding)
    lengths = lengths + [padding] * (padding > 0)
    assert len(layout) == sum(lengths)
    assert layout.lengths.tolist() == lengths
    assert layout.documents.tolist() == [number for number, length in enumerate(lengths) for _ in range(length)]
    assert layout.positions.tolist() == [place for length in lengths for place in range(length)]
    assert (layout.offsets.dtype, layout.positions.dtype) == (np.int32, np.int64)


@pytest.mark.parametrize(
    ("offsets", "message"),
    [
        ([1, 3], "begin with 0"),
        ([0, 5, 3, 9], "never descend"),
        ([0, 0], "length is 0; it must be an integer of at least 1"),
        ([0], "whole numbers"),
        ([0.0, 3.0], "whole numbers"),
    ],
)
def test_wrong_offsets_are_named(offsets, message):
    with pytest.raises(ValueError, match=message):
        PackedLayout(offsets)


def test_a_layout_ends_after_its_documents():
    for length in (6, 7.5):
        with pytest.raises(ValueError, match=f"length is {length}; it must be an integer of at least 7"):
            PackedLayout([0, 3, 7], length)


def test_a_layout_stays_as_it_was_made():
    offsets = np.array([0, 3, 5], dtype=np.int32)
    layout = PackedLayout(offsets)
    offsets[1] = 4
    assert layout.offsets.tolist() == [0, 3, 5]
    with pytest.raises(ValueError, match="read-only"):
        layout.offsets[1] = 4
