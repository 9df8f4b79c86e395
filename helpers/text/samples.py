"""`Samples`, token ids in one flat array, which every corpus is; and `TokenisedText`, which is cached.

The words of a tokenised text are numbered by falling count, ties in alphabetical order. Every vocabulary made from it
is then a prefix of its words, so that one cached file serves all of them.
"""

import hashlib
import itertools
import warnings
from array import array
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from helpers.lab.files import replacing

from .vocab import TOKENIZER, Vocab, tokenize

LAYOUT = "1"  # version of the cached files' format


class Samples:
    """Samples of token ids: `len(c)`, `c[i]`, `c.lengths`, `c.vocab`, and `c.source`, a phrase for captions.

    All ids lie in one flat array, `c.ids`; sample i is `ids[offsets[i] : offsets[i + 1]]`. `c[i]` is a view,
    so writing to it changes the corpus; of a slice, `c[a:b]` is a corpus of copies. 4 bytes a token and 8 a sample.
    """

    def __init__(self, ids: np.ndarray, offsets: np.ndarray, vocab: Vocab, source: str):
        self.ids, self.offsets, self.vocab, self.source = ids, offsets, vocab, source

    @property
    def lengths(self) -> np.ndarray:
        """(n,) Tokens of each sample."""
        return np.diff(self.offsets)

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def __getitem__(self, index: int | slice) -> "np.ndarray | Samples":
        if isinstance(index, slice):
            return self._part(range(len(self))[index])
        index = index.__index__()
        if not -len(self) <= index < len(self):
            raise IndexError(f"sample {index} of a corpus of {len(self)} samples")
        index %= len(self)
        return self.ids[self.offsets[index] : self.offsets[index + 1]]

    def _part(self, numbers: range) -> "Samples":
        """A copy of these samples, with the same vocabulary."""
        chosen = [self[number] for number in numbers]
        offsets = np.cumsum([0, *map(len, chosen)])
        ids = np.concatenate([self.ids[:0], *chosen])
        return Samples(ids, offsets, self.vocab, f"{self.source}, {len(chosen):,} of its samples")

    def __iter__(self) -> Iterator[np.ndarray]:
        return (self[index] for index in range(len(self)))

    def __repr__(self) -> str:
        return f"<{type(self).__name__}: {self.source}, {len(self):,} samples, {len(self.ids):,} tokens>"


@dataclass(frozen=True)
class TokenisedText:
    """A text before it has a vocabulary: its distinct words, most frequent first, and their indices as tokens."""

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
    words, ids = list(numbers), np.frombuffer(flat, np.int32) if flat else np.empty(0, np.int32)
    counts = np.bincount(ids, minlength=len(words))
    order = sorted(range(len(words)), key=lambda number: (-counts[number], words[number]))
    rank = np.empty(len(words), np.int32)
    rank[order] = np.arange(len(words), dtype=np.int32)
    return TokenisedText([words[number] for number in order], rank[ids], np.array(ends, np.int64))


def cache_key(checksums: Iterable[str], most: int | None) -> str:
    """A hash of what was tokenised: the files' contents, the number of lines, the tokeniser."""
    return hashlib.sha256("\n".join([LAYOUT, TOKENIZER, *checksums, "", str(most)]).encode()).hexdigest()[:32]


def save_tokens(tokens: TokenisedText, file: Path) -> None:
    """Write one .npz, whose members have CRCs, atomically. If it can't be written, warn."""
    text = np.frombuffer("\n".join([file.stem, *tokens.words]).encode(), np.uint8)
    try:
        with replacing(file) as stream:
            np.savez(stream, words=text, ids=tokens.ids, offsets=tokens.offsets)
    except OSError as error:
        reason = error.strerror or error
        warnings.warn(f"tokens are not cached: {file} cannot be written ({reason})", stacklevel=2)


def load_tokens(file: Path) -> TokenisedText | None:
    """What `save_tokens` wrote; None if the file is missing, or (with a warning) damaged."""
    try:
        with np.load(file, allow_pickle=False) as stored:
            text, ids, offsets = (stored[name] for name in ("words", "ids", "offsets"))
        name, *words = text.tobytes().decode().split("\n")
        if name != file.stem:
            raise ValueError("it is of another text")
    except FileNotFoundError:
        return None
    except Exception as error:  # damaged bytes fail in many ways: zip, header, CRC, sizes, text
        reason = " ".join(str(error).split()) or type(error).__name__
        warnings.warn(f"{file}: damaged, tokens are made again ({reason})", stacklevel=2)
        return None
    return TokenisedText(words, ids, offsets)
