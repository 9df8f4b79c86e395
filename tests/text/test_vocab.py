import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from helpers.text import Vocab

tokens = st.lists(st.text(st.characters(codec="utf-8", exclude_characters="\n"), max_size=6), max_size=30)


def test_ids_follow_counts_and_ties_follow_the_alphabet():
    vocab = Vocab([["b", "c", "b"], ["a", "c", "d"]])
    assert vocab.tokens == ("<pad>", "<unk>", "<eos>", "b", "c", "a", "d")
    assert vocab.encode(["d", "b"]).tolist() == [6, 3]
    assert vocab == Vocab({"a": 1, "d": 1, "c": 2, "b": 2})


def test_the_rarest_tokens_are_left_out():
    vocab = Vocab({"a": 5, "b": 2, "c": 2, "d": 1}, max_size=5)
    assert len(vocab) == 5
    assert vocab.tokens[3:] == ("a", "b")
    assert vocab.encode(["c", "a", "nowhere"]).tolist() == [vocab.unk_id, 3, vocab.unk_id]


@settings(deadline=None, max_examples=30)
@given(samples=st.lists(tokens, max_size=8))
def test_what_a_vocabulary_was_made_of_comes_back_but_never_as_padding_or_an_end(samples):
    samples.append(["<pad>", "<eos>", "<unk>"])
    vocab = Vocab(samples)
    for sample in samples:
        expected = [token if token not in ("<pad>", "<eos>") else "<unk>" for token in sample]
        assert vocab.decode(vocab.encode(sample)) == expected


def test_a_vocabulary_smaller_than_its_specials_is_refused():
    with pytest.raises(ValueError, match="max_size is 3; it must be an integer of at least 4"):
        Vocab([["a"]], max_size=3)
