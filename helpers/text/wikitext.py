"""`WikiText`: the lines of WikiText-103 as samples of token ids."""

import os
from pathlib import Path

from ..lab.arguments import check_at_least, check_choice
from . import wikitext_files as files
from .samples import Samples, TokenisedText, cache_file, load_tokens, save_tokens, tokenise_lines
from .vocab import TextError, Vocab

VOCAB_SIZE = 50_000


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
        check_choice(files.SPLITS, split=split)
        if max_samples is not None:
            check_at_least(1, max_samples=max_samples)
        sources = files.find(path, split)
        text = _tokens(sources, max_samples)
        if vocab is None:
            vocab = Vocab(text.counts, max_size=max_size)
        first = f", first {max_samples:,} lines" if max_samples == len(text.offsets) - 1 else ""
        super().__init__(text.encoded(vocab), text.offsets, vocab, files.name_of(sources[0]) + first)


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
    lines = tqdm(files.lines(sources), desc=sources[0].name, unit=" lines", delay=1, leave=False)
    text = tokenise_lines(lines, most)
    if len(text.offsets) == 1:
        raise TextError(f"{sources[0]}: empty, no line has a token in it; give a file with text")
    save_tokens(text, cached)
    return text
