"""`WikiText`: the lines of WikiText-103 as samples of token ids; and `corpus`: WikiText, or else synthetic text."""

import os
from pathlib import Path

from helpers.lab.arguments import check_choice, check_positive
from helpers.lab.files import cache_folder

from . import wikitext_files as files
from .samples import Samples, TokenisedText, cache_key, load_tokens, save_tokens, tokenise_lines
from .synthetic import SIZE, SyntheticText
from .vocab import SPECIALS, TextError, Vocab

VOCAB_SIZE = 50_000
SEEDS = {"train": 0, "validation": 1, "test": 2}  # of synthetic text


class WikiText(Samples):
    """One sample for each non-empty line of a split, paragraphs and headings (` = Title = `), in order.

    `path` is a folder or a file of WikiText: `wiki.*.raw` or `.tokens`, or the hub's parquet files. If it is a
    file, it is read for any `split`, and `source` says which it is. Without `path`, the hub's files are taken from the
    cache; `download=True` fetches missing ones (0.7 MB a split, 314 MB for `train`).

    Without `vocab`, the vocabulary has the split's `max_size` most frequent tokens (WikiText-103's training split has
    more than 200,000). Give other splits the vocabulary of the training split. `max_samples` takes the first lines.

    Tokens are cached in `cache` (default: `$HELPERS_CACHE`, else `~/.cache/deep-learning-speed`; False: not at all)
    under a hash of their source; damaged files are made again, with a warning. Tokenising takes about 1 s a million
    tokens (the training split has 100 million), reading the cache a tenth of a second a hundred MB.
    """

    def __init__(
        self,
        split: str = "train",
        path: Path | str | None = None,
        *,
        vocab: Vocab | None = None,
        min_count: int = 1,
        max_size: int | None = VOCAB_SIZE,
        max_samples: int | None = None,
        download: bool = False,
        cache: Path | str | bool | None = None,
    ):
        check_choice(files.SPLITS, split=split)
        if max_samples is not None:
            check_positive(max_samples=max_samples)
        source = _from_hub(split, cache, download) if path is None else files.find(path, split)
        text = _tokens(source, max_samples, cache)
        if vocab is None:
            vocab = Vocab(text.counts, min_count=min_count, max_size=max_size)
        elif not any(word in vocab for word in text.words if word not in SPECIALS):
            raise TextError(f"{source.files[0]}: the vocabulary given has none of its words; take that of a like text")
        first = f", first {max_samples:,} lines" if max_samples == len(text.offsets) - 1 else ""
        super().__init__(text.encoded(vocab), text.offsets, vocab, source.name + first)


def corpus(
    split: str = "train",
    path: Path | str | None = None,
    *,
    vocab: Vocab | None = None,
    download: bool = False,
    cache: Path | str | bool | None = None,
    max_samples: int | None = None,
    synthetic_samples: int = 10_000,
) -> Samples:
    """WikiText from `path`; else from the hub if `download` allows it; else `SyntheticText`. Its `source` says which.

    The splits of synthetic text are seeds 0, 1 and 2. A cached download is used only with `download=True`, so that the
    same call gives the same text on every machine.
    """
    check_choice(files.SPLITS, split=split)
    if path is not None or download:
        return WikiText(split, path, vocab=vocab, download=download, cache=cache, max_samples=max_samples)
    samples = synthetic_samples if max_samples is None else min(max_samples, synthetic_samples)
    made = SyntheticText(samples, SEEDS[split], SIZE if vocab is None else len(vocab))
    if vocab is not None and vocab != made.vocab:
        raise TextError("the vocabulary given is not that of synthetic text; give path= or download=True, as for it")
    return made


def local_wikitext() -> Path | None:
    """The folder of WikiText that `$HELPERS_WIKITEXT` names, for measurements; None if it isn't set."""
    folder = os.environ.get("HELPERS_WIKITEXT")
    return Path(folder) if folder else None


def _from_hub(split: str, cache: Path | str | bool | None, download: bool) -> files.Source:
    if download:
        files.parquet()  # an error before the download if pyarrow is missing
    return files.Source(tuple(files.hub_files(split, _folder(cache), download=download)))


def _folder(cache: Path | str | bool | None) -> Path:
    return cache_folder(None if isinstance(cache, bool) else cache)


def _tokens(source: files.Source, most: int | None, cache: Path | str | bool | None) -> TokenisedText:
    if cache is False:
        return _made(source, most)
    name = cache_key([files.sha256(file) for file in source.files], most)
    file = _folder(cache) / "tokens" / f"{name}.npz"
    text = load_tokens(file)
    if text is None:
        text = _made(source, most)
        save_tokens(text, file)
    return text


def _made(source: files.Source, most: int | None) -> TokenisedText:
    from tqdm import tqdm

    lines = tqdm(files.lines(source), desc=source.name, unit=" lines", delay=1, leave=False)
    text = tokenise_lines(lines, most)
    if len(text.offsets) == 1:
        raise TextError(f"{source.files[0]}: empty, no line has a token in it; give a file with text")
    return text
