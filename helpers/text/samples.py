"""What every corpus is: samples of token ids, in one array."""

from collections.abc import Iterator

import numpy as np

from .vocab import Vocab


class Samples:
    """Samples of token ids: `len(c)`, `c[i]`, `c.lengths`, `c.vocab`, and `c.source`, a phrase for captions.

    All ids lie in one flat array, `c.ids`; sample i is `ids[offsets[i] : offsets[i + 1]]`. `c[i]` is a view of it: it
    costs no copy, however many samples there are, and writing to it changes the corpus. 4 bytes a token and 8 a sample.
    """

    def __init__(self, ids: np.ndarray, offsets: np.ndarray, vocab: Vocab, source: str):
        self.ids, self.offsets, self.vocab, self.source = ids, offsets, vocab, source

    @property
    def lengths(self) -> np.ndarray:
        """How many tokens each sample has."""
        return np.diff(self.offsets)

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def __getitem__(self, index: int) -> np.ndarray:
        index = index.__index__()
        if not -len(self) <= index < len(self):
            raise IndexError(f"sample {index} of a corpus of {len(self)} samples")
        index %= len(self)
        return self.ids[self.offsets[index] : self.offsets[index + 1]]

    def __iter__(self) -> Iterator[np.ndarray]:
        return (self[index] for index in range(len(self)))

    def __repr__(self) -> str:
        return f"<{type(self).__name__}: {self.source}, {len(self):,} samples, {len(self.ids):,} tokens>"
