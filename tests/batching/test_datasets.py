"""Padding by hand: every sample cut to max_length and padded to it, or to the longest of its batch."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.utils.rnn import pad_sequence

from helpers import batching
from helpers.batching import BaseDataset, StandardDataset, collate_fn
from helpers.text import SyntheticText

samples = st.lists(st.lists(st.integers(1, 99), max_size=30), min_size=1, max_size=12)


@settings(max_examples=30, deadline=None)
@given(samples, st.integers(1, 20))
def test_each_sample_is_cut_and_padded_to_max_length(rows, max_length):
    for row, tokens in zip(rows, BaseDataset(rows, max_length), strict=True):
        assert tokens.dtype == torch.int64
        assert tokens.tolist() == row[:max_length] + [0] * (max_length - len(row))


@settings(max_examples=30, deadline=None)
@given(samples, st.integers(1, 20), st.integers(0, 5))
def test_a_batch_is_padded_to_its_longest_as_torch_would(rows, max_length, pad_id):
    dataset = StandardDataset(rows, max_length)
    batch = [dataset[i] for i in range(len(dataset))]
    expected = pad_sequence(batch, batch_first=True, padding_value=pad_id)
    assert torch.equal(collate_fn(batch, pad_id), expected)
    assert dataset.lengths.tolist() == [len(sample) for sample in batch]


@pytest.mark.parametrize("kind", [list, np.array, torch.tensor])
def test_samples_are_anything_that_holds_token_ids(kind):
    dataset = StandardDataset([kind([1, 2, 3]), kind([4])], 2)
    assert [sample.tolist() for sample in dataset] == [[1, 2], [4]]


def test_a_corpus_is_read_as_it_is():
    text = SyntheticText(50, 0)
    dataset = StandardDataset(text)
    assert np.array_equal(dataset.lengths, np.minimum(text.lengths, 640))
    assert np.array_equal(dataset[3], text[3][:640])
    dataset[3].zero_()
    assert text[3].any()  # a copy


def test_the_courses_names_are_the_same_things():
    assert batching.BrainDataset is BaseDataset
    assert batching.BigBrainDataset is batching.UltraDuperBigBrainDataset is StandardDataset


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: BaseDataset([]), "there are no samples"),
        (lambda: StandardDataset([[1]], 0), "max_length is 0; it must be an integer of at least 1"),
        (lambda: StandardDataset([[1], [1.5]])[1], r"float64 of shape \(1,\); it must be whole numbers in one"),
        (lambda: collate_fn([[True, False]]), "a sample is bool"),
    ],
)
def test_bad_input_is_named(call, message):
    with pytest.raises(ValueError, match=message):
        call()
