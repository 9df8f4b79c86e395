"""A text as numbers, before any vocabulary: what is cached, so that a text is tokenised once.

Words are numbered by falling count, ties in alphabetical order. Every vocabulary made from a text is then the first so
many words of it, and one cached file serves all of them.
"""

import hashlib
import itertools
import warnings
from array import array
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from .files import TextError, replacing
from .tokenizer import NAME, tokenize
from .vocab import Vocab

LAYOUT = "1"


@dataclass(frozen=True)
class Tokens:
    words: list[str]
    ids: np.ndarray  # (tokens,) int32, which word
    offsets: np.ndarray  # (samples + 1,) int64, where each sample begins

    @property
    def counts(self) -> dict[str, int]:
        return dict(zip(self.words, np.bincount(self.ids, minlength=len(self.words)).tolist(), strict=True))

    def encoded(self, vocab: Vocab) -> np.ndarray:
        """Ids of a vocabulary in place of the text's own; costs one pass."""
        return vocab.encode(self.words)[self.ids]


def tokenise(lines: Iterable[str], most: int | None = None) -> Tokens:
    """One sample a line, of the first `most` lines that have a token at all. About 1 s a million tokens."""
    numbers: defaultdict[str, int] = defaultdict(itertools.count().__next__)
    flat, ends = array("i"), array("q", [0])
    found = filter(None, map(tokenize, lines))
    for sample in itertools.islice(found, most):
        flat.extend(map(numbers.__getitem__, sample))
        ends.append(len(flat))
    words, ids = list(numbers), np.frombuffer(flat, np.int32) if flat else np.empty(0, np.int32)
    counts = np.bincount(ids, minlength=len(words))
    order = sorted(range(len(words)), key=lambda number: (-counts[number], words[number]))
    rank = np.empty(len(words), np.int32)
    rank[order] = np.arange(len(words), dtype=np.int32)
    return Tokens([words[number] for number in order], rank[ids], np.array(ends, np.int64))


def key(checksums: Iterable[str], member: str, most: int | None) -> str:
    """Names what was tokenised: the files' content, the part of them, the tokeniser."""
    return hashlib.sha256("\n".join([LAYOUT, NAME, *checksums, member, str(most)]).encode()).hexdigest()[:32]


def save(tokens: Tokens, file: Path) -> None:
    """Plain arrays in one .npz, whose members carry CRCs; written whole. What cannot be kept is only warned of."""
    text = np.frombuffer("\n".join([file.stem, *tokens.words]).encode(), np.uint8)
    try:
        with replacing(file) as stream:
            np.savez(stream, words=text, ids=tokens.ids, offsets=tokens.offsets)
    except TextError as error:
        warnings.warn(f"tokens are not kept, they will be made again: {error}", stacklevel=2)


def load(file: Path) -> Tokens | None:
    """What `save` wrote; None if there is nothing, or (with a warning) if what is there is damaged."""
    try:
        with np.load(file, allow_pickle=False) as stored:
            text, ids, offsets = (stored[name] for name in ("words", "ids", "offsets"))
        name, *words = text.tobytes().decode().split("\n")
        if name != file.stem or not _sound(len(words), ids, offsets):
            raise ValueError("its parts do not fit together")
    except FileNotFoundError:
        return None
    except Exception as error:  # damaged bytes fail in many ways: zip, header, CRC, sizes, text
        reason = " ".join(str(error).split()) or type(error).__name__
        warnings.warn(f"{file}: damaged, tokens are made again ({reason})", stacklevel=2)
        return None
    return Tokens(words, ids, offsets)


def _sound(words: int, ids: np.ndarray, offsets: np.ndarray) -> bool:
    return (
        (ids.dtype, ids.ndim, offsets.dtype, offsets.ndim) == (np.int32, 1, np.int64, 1)
        and len(offsets) > 1
        and (offsets[0], offsets[-1]) == (0, len(ids))
        and bool((np.diff(offsets) > 0).all())
        and (ids.min(), ids.max()) == (0, words - 1)
    )
