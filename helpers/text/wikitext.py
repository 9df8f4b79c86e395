"""`WikiText`: the lines of WikiText-103 as samples of token ids, from text or the Hugging Face hub's parquet files.

The old layout is `wiki.train.raw` (or `.tokens`, whose rare words are `<unk>`), `wiki.valid.*`, `wiki.test.*`; the
hub's layout is `train-00000-of-00002.parquet` and so on, one row a line.
"""

import os
import re
from collections.abc import Iterator
from pathlib import Path

from ..lab.arguments import check_at_least, check_choice
from .samples import Samples, TokenisedText, cache_file, load_tokens, save_tokens, tokenise_lines
from .vocab import TextError, Vocab

VOCAB_SIZE = 50_000
SPLITS = {"train": ("train",), "validation": ("valid", "validation"), "test": ("test",)}  # and their names in files

TO_GET_IT = (
    "to get it: hf download Salesforce/wikitext --repo-type dataset --include 'wikitext-103-raw-v1/*' --local-dir DIR"
)


class WikiText(Samples):
    """One sample for each non-empty line of a split, paragraphs and headings (` = Title = `), in order.

    `path` is a folder or a file of WikiText: `wiki.*.raw` or `.tokens`, or the hub's parquet files. If it is a
    file, it is read for any `split`, and `source` says which it is.

    Without `vocab`, the vocabulary has the split's `max_size` most frequent tokens (WikiText-103's training split has
    more than 200,000). Give other splits the vocabulary of the training split. `max_samples` takes the first lines.

    Tokens are cached in `$HELPERS_CACHE`, else `~/.cache/deep-learning-speed`, under a hash of their source. Tokenising
    takes about 1 s a million tokens (the training split has 100 million), reading the cache a tenth of a second a
    hundred MB.
    """

    def __init__(
        self,
        split: str,
        path: Path | str,
        *,
        vocab: Vocab | None = None,
        max_size: int | None = VOCAB_SIZE,
        max_samples: int | None = None,
    ):
        check_choice(SPLITS, split=split)
        if max_samples is not None:
            check_at_least(1, max_samples=max_samples)
        sources = find(path, split)
        text = _tokens(sources, max_samples)
        if vocab is None:
            vocab = Vocab(text.counts, max_size=max_size)
        first = f", first {max_samples:,} lines" if max_samples == len(text.offsets) - 1 else ""
        super().__init__(text.encoded(vocab), text.offsets, vocab, name_of(sources[0]) + first)


def local_wikitext() -> Path | None:
    """The folder of WikiText that `$HELPERS_WIKITEXT` names, for measurements; None if it isn't set."""
    folder = os.environ.get("HELPERS_WIKITEXT")
    return Path(folder) if folder else None


def _tokens(sources: list[Path], most: int | None) -> TokenisedText:
    """The first `most` lines, from the cache if they are in it."""
    from tqdm import tqdm

    cached = cache_file(sources, most)
    if (text := load_tokens(cached)) is not None:
        return text
    lines = tqdm(text_lines(sources), desc=sources[0].name, unit=" lines", delay=1, leave=False)
    text = tokenise_lines(lines, most)
    if len(text.offsets) == 1:
        raise TextError(f"{sources[0]}: empty, no line has a token in it; give a file with text")
    save_tokens(text, cached)
    return text


def find(path: Path | str, split: str) -> list[Path]:
    """The files of the split's text in a folder; a file is the text itself."""
    path = Path(path)
    if path.is_file():
        return [path]
    if not path.is_dir():
        raise TextError(f"{path}: is not there; give a folder or a file of WikiText ({TO_GET_IT})")
    for suffix in ("raw", "tokens"):
        for name in SPLITS[split]:
            if (file := path / f"wiki.{name}.{suffix}").is_file():
                return [file]
    parts = sorted(path.glob(f"{split}-*-of-*.parquet"))
    if not parts:
        sought = f"wiki.{SPLITS[split][0]}.raw or .tokens, {split}-*.parquet"
        raise TextError(f"{path}: has no {split} split ({sought}; {TO_GET_IT}); to use another text, name its file")
    if len(parts) != (count := int(parts[0].stem.rpartition("-")[2])):
        have = ", ".join(part.name for part in parts)
        raise TextError(f"{path}: the {split} split is {count} parquet files, here are only {have}")
    return parts


def name_of(file: Path) -> str:
    """The name for captions: which WikiText a file is of, as far as its name and its folder's tell."""
    folder = file.resolve().parent.name.lower()
    match = re.match(r"(?:wiki\.)?(train|valid|validation|test)\b", file.name)
    if not match:
        return file.name
    family = re.search(r"wikitext-(2|103)(?!\d)", folder)
    which = f"WikiText-{family[1]}" if family else "WikiText"
    raw = " raw" if file.suffix == ".raw" or (file.suffix == ".parquet" and "raw" in folder) else ""
    split = next(split for split, names in SPLITS.items() if match[1] in names)
    return f"{which}{raw}, {split} split"


def text_lines(files: list[Path]) -> Iterator[str]:
    """The text line by line, with one line in memory (of parquet: some thousand)."""
    for file in files:
        yield from _parquet_lines(file) if file.suffix == ".parquet" else _file_lines(file)


def _file_lines(file: Path) -> Iterator[str]:
    """Lines of UTF-8; each must end in a line feed."""
    try:
        with open(file, encoding="utf-8-sig", newline="\n") as stream:
            for number, line in enumerate(stream, start=1):
                if not line.endswith("\n"):
                    raise TextError(f"{file}, line {number}: cut off in mid-line; get the file again, or end its line")
                yield line
    except UnicodeDecodeError as error:
        raise TextError(f"{file}: not UTF-8 ({error.reason}); get the file again, or unpack it") from error


def _parquet_lines(file: Path) -> Iterator[str]:
    try:
        from pyarrow.parquet import ParquetFile
    except ImportError as error:
        raise TextError(f"{file}: reading parquet files needs pyarrow: pip install pyarrow ({error})") from error
    try:
        with ParquetFile(file) as stored:
            for batch in stored.iter_batches(columns=["text"]):
                yield from (row or "" for row in batch.column("text").to_pylist())
    except (OSError, ValueError, KeyError) as error:  # pyarrow's own errors are ValueErrors and OSErrors
        reason = str(error).splitlines()[0]
        raise TextError(f"{file}: not a whole parquet file with a text column ({reason}); get it again") from error
