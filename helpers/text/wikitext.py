"""`WikiText`: the lines of WikiText-103 as samples of token ids."""

from collections.abc import Iterable
from pathlib import Path

from . import hub, sources, tokens
from .files import TextError, at_least, cache_folder, sha256
from .samples import Samples
from .vocab import SPECIALS, Vocab

VOCAB_SIZE = 50_000


class WikiText(Samples):
    """One sample for each line of a split that has a token: paragraphs and headings (` = Title = `), in their order.

    `path` is a folder, a zip or a file of WikiText: `wiki.*.raw` or `.tokens`, or the hub's parquet files. A file that
    is named itself is read whatever `split` says, and `source` names what it is. Without `path`, the hub's files are
    taken from the cache; `download=True` fetches those that are not there (0.7 MB a split, 314 MB for `train`).

    Without `vocab`, the vocabulary is the split's own `max_size` most frequent tokens (WikiText-103's training split
    has more than 200,000). Give other splits the vocabulary of the training split. `max_samples` takes the first lines.

    Tokens are kept in `cache` (default: `$HELPERS_CACHE`, else `~/.cache/deep-learning-speed`; False: nowhere), named
    by the content they come from; damaged ones are made again, with a warning. Tokenising takes about 1 s a million
    tokens (the training split has 100 million); from the cache it takes a tenth of a second a hundred MB.
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
        check_split(split)
        if max_samples is not None:
            at_least("max_samples", max_samples, 1)
        source = _from_hub(split, cache, download) if path is None else sources.find(path, split)
        text = _tokens(source, max_samples, cache)
        if vocab is None:
            vocab = Vocab(text.counts, min_count=min_count, max_size=max_size)
        elif not any(word in vocab for word in text.words if word not in SPECIALS):
            raise TextError(f"{source.files[0]}: the vocabulary given has none of its words; take that of a like text")
        first = f", first {max_samples:,} lines" if max_samples == len(text.offsets) - 1 else ""
        super().__init__(text.encoded(vocab), text.offsets, vocab, source.name + first)


def check_split(split: str) -> None:
    if split not in sources.SPLITS:
        raise TextError(f"unknown split {split!r}; valid: {', '.join(sources.SPLITS)}")


def _from_hub(split: str, cache: Path | str | bool | None, download: bool) -> sources.Source:
    if download:
        sources.parquet()  # says so before the download if it is missing
    return sources.Source(tuple(hub.files(split, _folder(cache), download=download)))


def _folder(cache: Path | str | bool | None) -> Path:
    return cache_folder(None if isinstance(cache, bool) else cache)


def _tokens(source: sources.Source, most: int | None, cache: Path | str | bool | None) -> tokens.Tokens:
    if cache is False:
        return _made(source, most)
    name = tokens.key([sha256(file) for file in source.files], source.member, most)
    file = _folder(cache) / "tokens" / f"{name}.npz"
    text = tokens.load(file)
    if text is None:
        text = _made(source, most)
        tokens.save(text, file)
    return text


def _made(source: sources.Source, most: int | None) -> tokens.Tokens:
    text = tokens.tokenise(_with_bar(sources.lines(source), source.name), most)
    if len(text.offsets) == 1:
        raise TextError(f"{source.files[0]}: empty, no line has a token in it; give a file with text")
    return text


def _with_bar(lines: Iterable[str], name: str) -> Iterable[str]:
    from tqdm import tqdm

    return tqdm(lines, desc=name, unit=" lines", delay=1, leave=False)
