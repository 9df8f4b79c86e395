import codecs

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from helpers.text import TextError, Vocab, WikiText

tokens = st.lists(st.text(st.characters(codec="utf-8", exclude_characters="\n"), max_size=6), max_size=30)


def test_ids_follow_counts_and_ties_follow_the_alphabet():
    vocab = Vocab([["b", "c", "b"], ["a", "c", "d"]])
    assert vocab.tokens == ("<pad>", "<unk>", "<eos>", "b", "c", "a", "d")
    assert vocab.encode(["d", "b"]).tolist() == [6, 3]


def test_counts_give_the_same_vocabulary_as_samples():
    assert Vocab([["b", "c", "b"], ["a"]]) == Vocab({"a": 1, "c": 1, "b": 2})


def test_rare_tokens_are_left_out_by_count_and_by_size():
    counts = {"a": 5, "b": 2, "c": 2, "d": 1}
    assert Vocab(counts, min_count=2).tokens[3:] == ("a", "b", "c")
    vocab = Vocab(counts, max_size=5)
    assert len(vocab) == 5
    assert vocab.tokens[3:] == ("a", "b")
    assert vocab.encode(["c", "a", "nowhere"]).tolist() == [vocab.unk_id, 3, vocab.unk_id]
    assert "b" in vocab
    assert "c" not in vocab


def test_text_never_becomes_padding_or_an_end():
    vocab = Vocab([["<pad>", "<eos>", "<unk>", "a"]])
    assert len(vocab) == 4
    assert vocab.encode(["<pad>", "<eos>", "<unk>"]).tolist() == [vocab.unk_id] * 3


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None, max_examples=60)
@given(samples=st.lists(tokens, max_size=8))
def test_what_a_vocabulary_was_made_of_comes_back(samples, tmp_path):
    vocab = Vocab(samples)
    for sample in samples:
        expected = [token if token not in ("<pad>", "<eos>") else "<unk>" for token in sample]
        assert vocab.decode(vocab.encode(sample)) == expected
    vocab.save(tmp_path / "vocab.txt")
    loaded = Vocab.load(tmp_path / "vocab.txt")
    assert loaded == vocab
    assert all((loaded.encode(sample) == vocab.encode(sample)).all() for sample in samples)


def test_ids_are_what_an_embedding_takes():
    vocab = Vocab([["a", "b"]])
    ids = vocab.encode(["a", "b", "a"])
    assert ids.dtype == np.int32
    assert torch.nn.Embedding(len(vocab), 2)(torch.from_numpy(ids)).shape == (3, 2)
    assert vocab.decode(torch.from_numpy(ids)) == ["a", "b", "a"]


@pytest.mark.parametrize("number", [-1, 4])
def test_an_id_outside_the_vocabulary_is_named(number):
    with pytest.raises(TextError, match=rf"id {number} is outside the vocabulary: its ids go from 0 to 3"):
        Vocab([["a"]]).decode([3, number])


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"<pad>\n<unk>\n<eos>\na\nb", "cut off"),
        (b"a\nb\n", "not a vocabulary"),
        (b"<pad>\n<unk>\n<eos>\na\na\n", "a token twice"),
        (b"", "not a vocabulary"),
        (b"\xff\xfe\n", "UTF-8"),
    ],
)
def test_a_damaged_vocabulary_file_is_refused(content, said, tmp_path):
    file = tmp_path / "vocab.txt"
    file.write_bytes(content)
    with pytest.raises(TextError, match=said) as error:
        Vocab.load(file)
    assert str(file) in str(error.value)
    with pytest.raises(TextError, match="cannot be read"):
        Vocab.load(tmp_path / "absent.txt")


def test_a_byte_order_mark_is_no_part_of_a_text(tmp_path):
    file = tmp_path / "vocab.txt"
    Vocab([["a"]]).save(file)
    file.write_bytes(codecs.BOM_UTF8 + file.read_bytes())
    assert Vocab.load(file) == Vocab([["a"]])
    (tmp_path / "text.txt").write_bytes(codecs.BOM_UTF8 + b"the cat\nthe dog\n")
    assert WikiText(path=tmp_path / "text.txt", cache=False).vocab.tokens[3:] == ("the", "cat", "dog")


def test_a_vocabulary_that_cannot_be_written_leaves_the_old_file(tmp_path):
    file = tmp_path / "vocab.txt"
    Vocab([["a"]]).save(file)
    before = file.read_bytes()
    with pytest.raises(TextError, match="line end"):
        Vocab([["a\nb"]]).save(file)
    with pytest.raises(TextError, match="cannot be written"):
        Vocab([["b"]]).save(file / "below")
    assert file.read_bytes() == before


def test_wrong_arguments_are_named():
    with pytest.raises(TextError, match="tokenize it first"):
        Vocab(["one text"])
    with pytest.raises(ValueError, match="max_size is 3; it must be an integer of at least 4"):
        Vocab([["a"]], max_size=3)
    with pytest.raises(ValueError, match="min_count is 0"):
        Vocab([["a"]], min_count=0)


def test_a_text_is_not_taken_for_its_letters():
    with pytest.raises(TextError, match="'the' is one text, and not a list of tokens"):
        Vocab([["the"]]).encode("the")
