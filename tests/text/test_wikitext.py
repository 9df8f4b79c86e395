import codecs
import gzip
import shutil
import sys
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from helpers.text import TextError, Vocab, WikiText, local_wikitext, tokenize
from helpers.text import vocab as vocab_module

REAL = Path(__file__).resolve().parents[3] / "shared" / "data" / "wikitext-103"
TEXT = ' \n = Title = \n \n The cat , the dog .\n"\n A cat <unk> !\n'
SAMPLES = [["=", "title", "="], ["the", "cat", ",", "the", "dog", "."], ["a", "cat", "<unk>", "!"]]


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("HELPERS_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "wikitext-103-raw" / "wiki.valid.raw"
    path.parent.mkdir()
    path.write_text(TEXT, encoding="utf-8", newline="\n")
    return path


def words(text):
    return [text.vocab.decode(sample) for sample in text]


def test_a_sample_is_a_line_that_has_tokens_and_a_view_of_one_flat_array(file):
    text = WikiText("validation", file)
    assert words(text) == SAMPLES
    assert text.lengths.tolist() == [3, 6, 4]
    assert text[2][2] == text.vocab.unk_id
    assert text.ids.dtype == np.int32
    assert all(np.shares_memory(sample, text.ids) for sample in text)
    assert (text[-1] == text[np.int64(2)]).all()
    for outside in (3, -4):
        with pytest.raises(IndexError):
            text[outside]


line = st.text(st.characters(codec="utf-8", exclude_characters="\n"), max_size=30)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None, max_examples=20)
@given(lines=st.lists(line, max_size=12))
def test_the_flat_array_holds_what_a_list_of_samples_holds(lines, file):
    file.write_text("a\n" + "".join(f"{line}\n" for line in lines), encoding="utf-8", newline="\n")
    expected = [tokens for line in ["a", *lines] if (tokens := tokenize(line))]
    vocab = Vocab(expected)
    for _ in ("tokenised", "from the cache"):
        text = WikiText("validation", file, max_size=None)
        assert text.vocab == vocab
        assert len(text) == len(expected)
        assert all((vocab.encode(tokens) == sample).all() for tokens, sample in zip(expected, text, strict=True))


def test_a_file_named_itself_says_what_it_is(file, tmp_path):
    assert WikiText("train", file).source == "WikiText-103 raw, validation split"
    tokens = tmp_path / "wikitext-2" / "wiki.test.tokens"
    tokens.parent.mkdir()
    shutil.copy(file, tokens)
    assert WikiText("train", tokens).source == "WikiText-2, test split"
    own = tmp_path / "letters.txt"
    shutil.copy(file, own)
    assert WikiText("train", own, max_samples=2).source == "letters.txt, first 2 lines"


def test_the_vocabulary_is_as_large_as_asked_for_or_the_given_one(file):
    assert WikiText("validation", file, max_size=5).vocab.tokens[3:] == ("=", "cat")
    text = WikiText("validation", file, vocab=Vocab([["cat", "the"]]))
    assert words(text)[1] == ["the", "cat", "<unk>", "the", "<unk>", "<unk>"]


def test_the_second_time_nothing_is_tokenised(file, monkeypatch):
    first = WikiText("validation", file)
    monkeypatch.setattr("helpers.text.samples.tokenize", None)
    again = WikiText("validation", file)
    assert again.vocab == first.vocab
    assert (again.ids == first.ids).all()
    assert words(WikiText("validation", file, max_size=5))[0] == ["=", "<unk>", "="]


def test_a_damaged_cache_is_made_anew_and_one_that_cannot_be_written_does_without(file, cache, monkeypatch):
    WikiText("validation", file)
    (cached,) = (cache / "tokens").iterdir()
    content = cached.read_bytes()
    for damaged in (b"", content[:-40], content.replace(b"title", b"tutle")):
        cached.write_bytes(damaged)
        assert words(WikiText("validation", file)) == SAMPLES
    cached.unlink()

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    assert words(WikiText("validation", file)) == SAMPLES
    assert list((cache / "tokens").iterdir()) == []


def test_another_content_is_another_text(file):
    WikiText("validation", file)
    file.write_text("Other words\n")
    assert words(WikiText("validation", file)) == [["other", "words"]]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "empty, no line has a token"),
        (codecs.BOM_UTF8 + b" \n\n", "empty, no line has a token"),
        (b"whole\ncut of", "line 2: cut off in mid-line"),
        ("whole\ncafé\n".encode("latin-1"), "not UTF-8"),
    ],
)
def test_a_damaged_text_is_named_and_nothing_is_cached(content, message, file, cache):
    file.write_bytes(content)
    with pytest.raises(TextError, match=message) as error:
        WikiText("validation", file)
    assert str(file) in str(error.value)
    assert "\n" not in str(error.value)
    assert not cache.exists()


def test_a_packed_text_is_not_unpacked_but_refused(tmp_path):
    packed = tmp_path / "wiki.train.raw.gz"
    packed.write_bytes(gzip.compress(bytes(50_000_000), 1))
    tracemalloc.start()
    with pytest.raises(TextError, match=r"raw\.gz: not UTF-8 .*unpack it"):
        WikiText("train", packed)
    assert tracemalloc.get_traced_memory()[1] < 5e6
    tracemalloc.stop()


def test_parquet_files_are_read_whole_or_named(tmp_path):
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    folder = tmp_path / "wikitext-103-raw-v1"
    folder.mkdir()
    for part, rows in enumerate([["", " = Title = \n"], ["The cat\n", "The dog\n"]]):
        parquet.write_table(pyarrow.table({"text": rows}), folder / f"train-0000{part}-of-00002.parquet")
    text = WikiText("train", folder)
    assert text.source == "WikiText-103 raw, train split"
    assert [text.vocab.decode(sample) for sample in text] == [["=", "title", "="], ["the", "cat"], ["the", "dog"]]
    second = folder / "train-00001-of-00002.parquet"
    second.write_bytes(second.read_bytes()[:-20])
    with pytest.raises(TextError, match="not a whole parquet file"):
        WikiText("train", folder)
    second.unlink()
    with pytest.raises(TextError, match=r"train split is 2 parquet files, here are only train-00000-of-00002\.parquet"):
        WikiText("train", folder)


def test_without_pyarrow_a_parquet_file_says_what_it_needs(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    (tmp_path / "test-00000-of-00001.parquet").touch()
    with pytest.raises(TextError, match=r"00001\.parquet: .*pip install pyarrow"):
        WikiText("test", tmp_path)


def test_what_is_not_there_is_named(file, tmp_path):
    with pytest.raises(TextError, match=r"nowhere: is not there.*hf download"):
        WikiText("train", tmp_path / "nowhere")
    with pytest.raises(TextError, match="has no train split"):
        WikiText("train", file.parent)
    with pytest.raises(ValueError, match="split is 'valid'; valid: 'train', 'validation', 'test'"):
        WikiText("valid", file)
    with pytest.raises(ValueError, match="max_samples is 0"):
        WikiText("validation", file, max_samples=0)


def test_the_tokens_are_those_of_basic_english_and_without_torchtext_the_requirement_is_named(monkeypatch):
    assert tokenize('The "Cat" , don\'t; (stop)!') == ["the", "cat", ",", "don", "'", "t", "(", "stop", ")", "!"]
    monkeypatch.setitem(sys.modules, "torchtext.data.utils", None)
    vocab_module._tokenizer.cache_clear()
    with pytest.raises(TextError, match=r"pip install torchtext==0.6.0"):
        tokenize("a")


@pytest.mark.skipif(not REAL.is_dir(), reason="WikiText's validation and test split are not here")
def test_the_real_text_has_the_known_shape():
    valid, test = (WikiText(split, REAL) for split in ("validation", "test"))
    assert (len(valid), len(test)) == (2461, 2891)
    assert valid.source == "WikiText-103, validation split"
    lengths = np.concatenate([valid.lengths, test.lengths])
    assert lengths.sum() == 456_614
    assert (np.median(lengths), lengths.max(), lengths.min()) == (71, 478, 1)
    assert round(lengths.mean(), 1) == 85.3
    assert round((lengths <= 10).mean(), 2) == 0.29
    assert len(set(valid.vocab.tokens[3:]) | set(test.vocab.tokens[3:]) | {"<unk>"}) == 24_725
    assert valid.vocab.decode(valid[0]) == ["=", "homarus", "gammarus", "="]


def test_the_environment_names_the_text_of_measurements(monkeypatch):
    monkeypatch.delenv("HELPERS_WIKITEXT", raising=False)
    assert local_wikitext() is None
    monkeypatch.setenv("HELPERS_WIKITEXT", "wikitext-103")
    assert local_wikitext() == Path("wikitext-103")
