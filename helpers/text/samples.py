"""`Samples`, token ids in one flat array, which every corpus is; and `TokenisedText`, which is cached.

A tokenised text numbers its words as they come, so that one cached file serves every vocabulary.
"""

import contextlib
import hashlib
import itertools
from array import array
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from ..lab.files import cache_folder, replacing
from .vocab import TOKENIZER, Vocab, tokenize

LAYOUT = "2"  # version of the cached files' format


class Samples:
    """Samples of token ids: `len(c)`, `c[i]`, `c.lengths`, `c.vocab`, and `c.source`, a phrase for captions.

    All ids lie in one flat array, `c.ids`; sample i is `ids[offsets[i] : offsets[i + 1]]`. `c[i]` is a view,
    so writing to it changes the corpus. 4 bytes a token and 8 a sample.
    """

    def __init__(self, ids: np.ndarray, offsets: np.ndarray, vocab: Vocab, source: str):
        self.ids, self.offsets, self.vocab, self.source = ids, offsets, vocab, source

    @property
    def lengths(self) -> np.ndarray:
        """(n,) Tokens of each sample."""
        return np.diff(self.offsets)

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def __getitem__(self, index: int) -> np.ndarray:
        index = range(len(self))[index]
        return self.ids[self.offsets[index] : self.offsets[index + 1]]

    def __repr__(self) -> str:
        return f"<{type(self).__name__}: {self.source}, {len(self):,} samples, {len(self.ids):,} tokens>"


@dataclass(frozen=True)
class TokenisedText:
    """A text before it has a vocabulary: its distinct words, and their indices as tokens."""

    words: list[str]
    ids: np.ndarray  # (tokens,) int32, indices in `words`
    offsets: np.ndarray  # (samples + 1,) int64: sample i is ids[offsets[i] : offsets[i + 1]]

    @property
    def counts(self) -> dict[str, int]:
        return dict(zip(self.words, np.bincount(self.ids, minlength=len(self.words)).tolist(), strict=True))

    def encoded(self, vocab: Vocab) -> np.ndarray:
        """The tokens as ids of a vocabulary; costs one pass."""
        return vocab.encode(self.words)[self.ids]


def tokenise_lines(lines: Iterable[str], most: int | None = None) -> TokenisedText:
    """One sample a line, of the first `most` lines that have a token. About 1 s a million tokens."""
    numbers: defaultdict[str, int] = defaultdict(itertools.count().__next__)
    flat, ends = array("i"), array("q", [0])
    for sample in itertools.islice(filter(None, map(tokenize, lines)), most):
        flat.extend(map(numbers.__getitem__, sample))
        ends.append(len(flat))
    return TokenisedText(list(numbers), np.array(flat, np.int32), np.array(ends, np.int64))


def cache_file(sources: Iterable[Path], most: int | None) -> Path:
    """The file in the cache for what is tokenised: named by the files' contents, the number of lines, the tokeniser.

    Costs a pass over the files: about a second a GB.
    """
    name = hashlib.sha256("\n".join([LAYOUT, TOKENIZER, str(most)]).encode())
    for source in sources:
        with open(source, "rb") as stream:
            name.update(hashlib.file_digest(stream, "sha256").digest())
    return cache_folder() / "tokens" / f"{name.hexdigest()[:32]}.npz"


def save_tokens(tokens: TokenisedText, file: Path) -> None:
    """Write one .npz, whose members have CRCs, atomically; nothing where that can't be written."""
    text = np.frombuffer("\n".join(tokens.words).encode(), np.uint8)
    with contextlib.suppress(OSError), replacing(file) as stream:
        np.savez(stream, words=text, ids=tokens.ids, offsets=tokens.offsets)


def load_tokens(file: Path) -> TokenisedText | None:
    """What `save_tokens` wrote; None if it is not there, or damaged."""
    with contextlib.suppress(Exception):  # damaged bytes fail in many ways: zip, header, CRC, sizes, text
        with np.load(file, allow_pickle=False) as stored:
            words, ids, offsets = (stored[name] for name in ("words", "ids", "offsets"))
        return TokenisedText(words.tobytes().decode().split("\n"), ids, offsets)
    return None
