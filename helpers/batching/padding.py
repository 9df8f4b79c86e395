"""Padding by hand: samples of different lengths side by side in one rectangle of token ids."""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

Sample = Sequence[int] | np.ndarray | Tensor


def token_ids(sample: Sample) -> np.ndarray:
    """A sample as an array, of whole numbers: what has a fraction would lose it, and nobody would see."""
    ids = np.asarray(sample)
    if ids.size and ids.dtype.kind not in "iu":
        raise ValueError(f"a sample holds {ids.dtype}; token ids must be whole numbers")
    return ids


def pad(samples: Sequence[Sample], length: int | None = None, pad_id: int = 0) -> Tensor:
    """Token ids (B, length) as int64: each sample on the left of its row, `pad_id` after it.

    `length` is that of the longest sample if it isn't given; longer samples are cut to it. One copy of each sample.
    """
    rows = [token_ids(sample) for sample in samples]
    if length is None:
        length = max((len(row) for row in rows), default=0)
    tokens = np.full((len(rows), length), pad_id, dtype=np.int64)
    for line, row in zip(tokens, rows, strict=True):
        row = row[:length]
        line[: len(row)] = row
    return torch.from_numpy(tokens)


def padding_share(lengths: Sequence[int] | np.ndarray, length: int | None = None) -> float:
    """The share of a batch that is padding, from its samples' lengths."""
    lengths = np.asarray(lengths)
    length = int(lengths.max(initial=0)) if length is None else length
    area = length * len(lengths)
    return 1 - int(np.minimum(lengths, length).sum()) / area if area else 0.0
