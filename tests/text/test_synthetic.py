import hashlib

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from helpers.text import SyntheticText


@pytest.fixture(scope="module")
def text():
    return SyntheticText(6000)


def test_lengths_and_frequencies_are_those_of_wikitext(text):
    lengths = text.lengths
    assert abs(np.median(lengths) - 71) <= 5
    assert abs(lengths.mean() - 85.3) <= 3
    assert abs((lengths <= 10).mean() - 0.29) <= 0.02
    assert lengths.min() >= 1
    assert 400 < lengths.max() <= 478
    counts = np.bincount(text.ids, minlength=len(text.vocab))
    assert counts[:3].tolist() == [0, 0, 0]
    counts = counts[3:]
    rank = np.arange(1, 1001)
    assert abs(np.polyfit(np.log(rank), np.log(counts[:1000]), 1)[0] + 0.97) < 0.03  # they fall as rank**-0.97
    assert len(text.vocab) == 24_728


@settings(deadline=None, max_examples=10)
@given(st.integers(1, 60), st.integers(0, 2**64), st.integers(4, 2**16))
def test_samples_are_whole_within_bounds_and_repeatable(samples, seed, vocab_size):
    text, longer = SyntheticText(samples, seed, vocab_size), SyntheticText(samples + 5, seed, vocab_size)
    assert (len(text), len(text.vocab)) == (samples, vocab_size)
    assert text.lengths.min() >= 1 and text.lengths.max() <= 478
    assert text.ids.min() >= 3 and text.ids.max() < vocab_size
    assert (longer.ids[: len(text.ids)] == text.ids).all()


def test_a_seed_is_the_same_text_on_every_machine(text):
    assert hashlib.sha256(text.ids.astype("<i4").tobytes()).hexdigest()[:16] == "ac1cc21d861ae03d"
    assert hashlib.sha256(text.offsets.astype("<i8").tobytes()).hexdigest()[:16] == "b81cd9d0a97565bb"


def test_other_seeds_are_other_texts_in_the_same_language():
    texts = [SyntheticText(50, seed) for seed in (0, 1, 2)]
    assert [text.source for text in texts] == [f"synthetic text, seed {seed}" for seed in (0, 1, 2)]
    assert texts[0].vocab == texts[1].vocab == texts[2].vocab
    assert not np.array_equal(texts[0][0], texts[1][0])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"samples": 0}, "samples is 0; it must be an integer of at least 1"),
        ({"samples": 2.5}, "samples is 2.5"),
        ({"seed": -1}, "seed is -1"),
        ({"vocab_size": 3}, "vocab_size is 3"),
        ({"vocab_size": 2**16 + 1}, "at most 65536"),
    ],
)
def test_wrong_arguments_are_named(arguments, message):
    with pytest.raises(ValueError, match=message):
        SyntheticText(**arguments)
