"""Datasets of token ids, cut to `max_length`: padded one by one, or left to `collate_fn` to pad.

    loader = DataLoader(BaseDataset(corpus), batch_size=32)                             # BRAIN: all 640 long
    loader = DataLoader(StandardDataset(corpus), batch_size=32, collate_fn=collate_fn)  # BIG BRAIN

The third way, batches of nearly one length, is `StandardDataset` with a `BalancedBatchSampler`; the fourth, no padding
at all, is `SequencedDataset`.
"""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from .lengths import at_least, lengths_of
from .padding import Sample, pad, token_ids


class StandardDataset(Dataset[Tensor]):
    """Samples as int64 tensors, cut to `max_length` and not padded.

    `samples` is anything with a length whose elements are token ids: a corpus of `helpers.text`, a list of lists,
    arrays or tensors. An element costs one copy. `crop=False` makes a sample that is too long an error instead.
    """

    def __init__(self, samples: Sequence[Sample], max_length: int = 640, *, crop: bool = True, pad_id: int = 0) -> None:
        if not len(samples):
            raise ValueError("there are no samples; the dataset must hold at least one")
        self.samples, self.max_length, self.pad_id = samples, at_least("max_length", max_length, 1), pad_id
        whole = lengths_of(samples)
        self.lengths = np.minimum(whole, self.max_length)  # (n,) as the samples come out
        if not crop and whole.max() > self.max_length:
            longest = int(whole.argmax())
            raise ValueError(
                f"sample {longest} has {whole[longest]} tokens and max_length is {max_length}; "
                "raise max_length, or cut samples with crop=True"
            )

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> Tensor:
        return torch.tensor(token_ids(self.samples[index])[: self.max_length], dtype=torch.int64)


class BaseDataset(StandardDataset):
    """Samples cut *and* padded to `max_length`: every batch is as wide as the longest sample might be."""

    def __getitem__(self, index: int) -> Tensor:
        return pad([self.samples[index]], self.max_length, self.pad_id)[0]


def collate_fn(batch: Sequence[Sample], pad_id: int = 0) -> Tensor:
    """A batch (B, T) of samples, padded on the right to the longest of them."""
    return pad(batch, pad_id=pad_id)
