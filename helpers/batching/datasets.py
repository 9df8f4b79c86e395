"""Datasets of token ids, cut to `max_length`: padded one by one, or left to `collate_fn` to pad.

    loader = DataLoader(BaseDataset(corpus), batch_size=32)                             # BRAIN: all 640 long
    loader = DataLoader(StandardDataset(corpus), batch_size=32, collate_fn=collate_fn)  # BIG BRAIN

`StandardDataset` with a `BalancedBatchSampler` makes batches of nearly one length; `SequencedDataset` pads nothing.

Also here: what every piece of batching takes as samples and as lengths.
"""

import zlib
from collections.abc import Sequence

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import Dataset

from ..lab.arguments import check_at_least

Sample = Sequence[int] | np.ndarray | Tensor
Lengths = Sequence[int] | np.ndarray | Tensor

LONGEST = 2**40  # tokens of a sample, so that sums of millions of lengths fit into 64 bits


class StandardDataset(Dataset[Tensor]):
    """Samples as int64 tensors, cut to `max_length` and not padded.

    `samples` is anything with a length whose elements are token ids: a corpus of `helpers.text`, a list of lists,
    arrays or tensors. An element costs one copy.
    """

    def __init__(self, samples: Sequence[Sample], max_length: int = 640, *, pad_id: int = 0) -> None:
        if not len(samples):
            raise ValueError("there are no samples; the dataset must hold at least one")
        check_at_least(1, max_length=max_length)
        self.samples, self.max_length, self.pad_id = samples, max_length, pad_id
        self.lengths = np.minimum(lengths_of(samples), max_length)  # (n,) as the samples come out

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> Tensor:
        return self._cut(self.samples[index])

    def _cut(self, sample: Sample) -> Tensor:
        return torch.tensor(token_ids(sample)[: self.max_length], dtype=torch.int64)


class BaseDataset(StandardDataset):
    """Samples cut *and* padded to `max_length`: every batch is as wide as the longest sample might be."""

    def _cut(self, sample: Sample) -> Tensor:
        tokens = super()._cut(sample)
        return F.pad(tokens, (0, self.max_length - len(tokens)), value=self.pad_id)


def collate_fn(batch: Sequence[Sample], pad_id: int = 0) -> Tensor:
    """A batch (B, T) of samples, padded on the right to the longest of them."""
    rows = [torch.tensor(token_ids(sample), dtype=torch.int64) for sample in batch]
    return pad_sequence(rows, batch_first=True, padding_value=pad_id)


def token_ids(sample: Sample, name: str = "a sample") -> np.ndarray:
    """A sample as an array (T,); a ValueError, which calls it by its name, if it isn't integers in one dimension."""
    ids = np.asarray(sample)
    if ids.ndim != 1 or (ids.size and ids.dtype.kind not in "iu"):  # an empty list is an array of floats
        raise ValueError(f"{name} is {ids.dtype} of shape {ids.shape}; it must be whole numbers in one dimension")
    return ids


def lengths_of(samples: Sequence[Sample]) -> np.ndarray:
    """The lengths of samples (n,): a corpus knows its own; of anything else each sample is looked at once."""
    known = getattr(samples, "lengths", None)
    if known is None:
        return checked_lengths([len(samples[index]) for index in range(len(samples))])
    return checked_lengths(known)


def checked_lengths(lengths: Lengths) -> np.ndarray:
    """The lengths as int64 (n,); a ValueError names the first that is none. About 2 ms for a million."""
    array = np.asarray(lengths)
    if array.ndim != 1 or (len(array) and array.dtype.kind not in "iu"):
        raise ValueError(
            f"lengths are {array.dtype} of shape {array.shape}; they must be whole numbers in one dimension"
        )
    if (wrong := (array < 0) | (array > LONGEST)).any():
        first = int(np.argmax(wrong))
        raise ValueError(f"length {first} is {array[first]}; lengths must be whole numbers from 0 to {LONGEST}")
    return array.astype(np.int64)


def checksum(lengths: np.ndarray) -> int:
    """CRC-32 of lengths (n,) int64, by which a state knows its dataset. 8 ms for a million."""
    return zlib.crc32(np.ascontiguousarray(lengths))
