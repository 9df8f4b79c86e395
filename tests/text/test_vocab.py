import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from helpers.text import TextError, Vocab

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
    assert "b" in vocab
    assert "c" not in vocab


@settings(deadline=None, max_examples=30)
@given(samples=st.lists(tokens, max_size=8))
def test_what_a_vocabulary_was_made_of_comes_back_but_never_as_padding_or_an_end(samples):
    samples.append(["<pad>", "<eos>", "<unk>"])
    vocab = Vocab(samples)
    for sample in samples:
        expected = [token if token not in ("<pad>", "<eos>") else "<unk>" for token in sample]
        assert vocab.decode(vocab.encode(sample)) == expected


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: Vocab([["a"]]).decode([3, -1]), "id -1 is outside the vocabulary: its ids go from 0 to 3"),
        (lambda: Vocab(["one text"]), "tokenize it first"),
        (lambda: Vocab([["the"]]).encode("the"), "'the' is one text, and not a list of tokens"),
        (lambda: Vocab([["a"]], max_size=3), "max_size is 3; it must be an integer of at least 4"),
    ],
)
def test_wrong_arguments_are_named(call, message):
    with pytest.raises(ValueError, match=message) as error:
        call()
    assert isinstance(error.value, TextError) or "integer" in str(error.value)
