"""The tokeniser, from text to tokens, and the vocabulary, from tokens to ids."""

import functools
import itertools
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence

import numpy as np

from ..lab.arguments import check_at_least

TOKENIZER = "basic_english"  # of torchtext: the task's
PAD, UNK, EOS = "<pad>", "<unk>", "<eos>"
SPECIALS = (PAD, UNK, EOS)


class TextError(ValueError):
    """Text that is missing or damaged: the message names the file or value and says what to do."""


def tokenize(text: str) -> list[str]:
    """Lower-case words and punctuation marks: `"Don't!"` -> `["don", "'", "t", "!"]`.

    Drops double quotes, colons and semicolons. Costs about 0.7 s a million tokens; the first call loads torchtext.
    """
    return _tokenizer()(text)


@functools.cache
def _tokenizer() -> Callable[[str], list[str]]:
    try:
        from torchtext.data.utils import get_tokenizer
    except (ImportError, OSError) as error:  # OSError: its compiled part is of another torch
        reason = str(error).splitlines()[0]
        raise TextError(f"tokenising needs torchtext: pip install torchtext==0.6.0 ({reason})") from error
    return get_tokenizer(TOKENIZER)


class Vocab:
    """Tokens and their ids: `<pad>` 0, `<unk>` 1, `<eos>` 2, then by falling count, ties in alphabetical order.

    Made from samples (lists of tokens) or from counts. Left out are the rarest tokens beyond `max_size`, which counts
    the three specials.

    A token of the text that is spelled `<pad>` or `<eos>` becomes `<unk>`, as does WikiText's own `<unk>` for rare
    words. `<eos>` is for joining samples; no corpus contains it.
    """

    pad_id, unk_id = 0, 1

    def __init__(self, samples: Mapping[str, int] | Iterable[Sequence[str]], *, max_size: int | None = None):
        counts = samples if isinstance(samples, Mapping) else Counter(itertools.chain.from_iterable(samples))
        words = [word for word in counts if word not in SPECIALS]
        words.sort(key=lambda word: (-counts[word], word))
        if max_size is not None:
            check_at_least(len(SPECIALS) + 1, max_size=max_size)
            words = words[: max_size - len(SPECIALS)]
        self.tokens = (*SPECIALS, *words)
        self._ids = {token: number for number, token in enumerate(self.tokens)}
        self._ids |= {PAD: self.unk_id, EOS: self.unk_id}

    def __len__(self) -> int:
        return len(self.tokens)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Vocab) and self.tokens == other.tokens

    def __repr__(self) -> str:
        return f"<Vocab of {len(self):,} tokens>"

    def encode(self, tokens: Sequence[str]) -> np.ndarray:
        """Ids (n,) int32 of tokens; unknown tokens become `unk_id`."""
        ids = self._ids
        return np.fromiter((ids.get(token, self.unk_id) for token in tokens), np.int32, len(tokens))

    def decode(self, ids: Iterable[int]) -> list[str]:
        """Tokens of ids (an array, a tensor or a list)."""
        return [self.tokens[int(number)] for number in ids]
