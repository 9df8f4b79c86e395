"""Where the language model's batches come from: lines of text, made token ids, padded or packed, by a `DataLoader`.

`Loader` gives `train(epoch)` and `validation()`, iterators of a `Batch` on the device. Of an epoch nothing is left out.
"""

import functools
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Sampler

from helpers.batching import BaseDataset, SequencedDataset, StandardDataset, collate_fn
from helpers.batching.sequenced import Packed, PackedLayout
from helpers.tasks.order import shuffled
from helpers.text import Samples, SyntheticText, Vocab, corpus, tokenize

from .switches import Fixes


@dataclass(frozen=True)
class Batch:
    """Tokens (B, T) and what follows each, (B, T); packed, B is 1, and `positions` (T,) and `layout` tell documents."""

    tokens: Tensor
    targets: Tensor
    real: int  # targets that aren't padding, known without a look at the device
    positions: Tensor | None = None
    layout: PackedLayout | None = None  # on the host


@dataclass(frozen=True, kw_only=True)
class Feed:
    """What batches are made of. Packed, a batch is as many tokens as `batch_size` samples have on the mean."""

    batch_size: int
    max_length: int  # of a sample, the last token included, which only is a target
    workers: int
    seed: int
    device: torch.device


def open_texts(path: str | Path | None, samples: int, validation_samples: int, vocab_size: int) -> tuple[Samples, ...]:
    """Training and validation text: made up, or WikiText's validation split to learn from and its test split to judge.

    `vocab_size` is of made-up text; that of WikiText follows from what is learned from.
    """
    if path is None:
        return SyntheticText(samples, 0, vocab_size), SyntheticText(validation_samples, 1, vocab_size)
    train = corpus("validation", path, max_samples=samples)
    return train, corpus("test", path, vocab=train.vocab, max_samples=validation_samples)


class Lines:
    """Samples as lines of text, which are split and looked up whenever one is asked for: 0.7 µs a token."""

    def __init__(self, samples: Samples) -> None:
        self.vocab: Vocab = samples.vocab
        self.lengths = samples.lengths
        self.lines = [" ".join(self.vocab.decode(sample)) for sample in samples]
        tokenize("")  # what that needs is missed here, in a line, and not in a worker with its traceback

    def __len__(self) -> int:
        return len(self.lines)

    def __getitem__(self, index: int) -> np.ndarray:
        return self.vocab.encode(tokenize(self.lines[index]))


class EpochBatches(Sampler[list[int]]):
    """Random batches of indices, which follow from the seed and `epoch` alone; the last may be smaller."""

    def __init__(self, count: int, batch_size: int, seed: int) -> None:
        self.count, self.batch_size, self.seed, self.epoch = count, batch_size, seed, 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __len__(self) -> int:
        return -(-self.count // self.batch_size)

    def __iter__(self) -> Iterator[list[int]]:
        return (part.tolist() for part in shuffled(self.count, self.seed, self.epoch).split(self.batch_size))


class Loader:
    """The batches of a set of fixes. `prepare_s` is what it took to make all lines token ids, if that is done first."""

    def __init__(self, fixes: Fixes, train: Samples, validation: Samples, feed: Feed) -> None:
        self.feed, self.pad_id = feed, train.vocab.pad_id
        lines = [Lines(split) for split in (train, validation)]
        began = time.perf_counter()
        splits = [list(split) for split in lines] if "token_cache" in fixes else lines
        self.prepare_s = time.perf_counter() - began if "token_cache" in fixes else 0.0
        kind = StandardDataset if "short_padding" in fixes else BaseDataset
        learned, judged = (kind(split, feed.max_length, pad_id=self.pad_id) for split in splits)
        self.pinned = "pinned" in fixes and feed.device.type == "cuda"
        workers = feed.workers if "workers" in fixes else 0
        options = {
            "num_workers": workers,
            "pin_memory": self.pinned,
            "persistent_workers": workers > 0,
            "prefetch_factor": 4 if workers else None,
        }
        collate = functools.partial(_padded, pad_id=self.pad_id)
        self._validation = DataLoader(judged, feed.batch_size, collate_fn=collate, **options)
        if "packed" in fixes:
            unpadded = StandardDataset(splits[0], feed.max_length, pad_id=self.pad_id)
            capacity = _capacity(unpadded.lengths, feed.batch_size)
            self._order = SequencedDataset(
                unpadded, None, capacity, strategy="best-fit", seed=feed.seed, pad_id=self.pad_id, fixed=True
            )
            self._train = DataLoader(self._order, batch_size=None, **options)
        else:
            self._order = EpochBatches(len(learned), feed.batch_size, feed.seed)
            self._train = DataLoader(learned, batch_sampler=self._order, collate_fn=collate, **options)

    def train(self, epoch: int) -> Iterator[Batch]:
        self._order.set_epoch(epoch)
        return map(self._on_device, self._train)

    def validation(self) -> Iterator[Batch]:
        """Padded, in the order of the text, and packed never: the same batches whatever is trained on."""
        return map(self._on_device, self._validation)

    def _on_device(self, made: Tensor | Packed) -> Batch:
        """Counted by numpy: to a profile, reading a tensor looks like waiting for a device, wherever it lies."""
        there = made.to(self.feed.device, non_blocking=self.pinned)
        if isinstance(made, Packed):
            offsets = made.offsets.numpy()
            real = int(offsets[-1]) - (len(offsets) - 1)  # the last token of each document has no target
            targets = there.targets(self.pad_id)
            return Batch(there.tokens[None], targets[None], real, there.positions, made.layout())
        real = int(np.count_nonzero(made.numpy()[:, 1:] != self.pad_id))
        return Batch(there[:, :-1], there[:, 1:], real)


def _padded(samples: list[Tensor], pad_id: int) -> Tensor:
    """(B, T + 1), at least two tokens wide, so that something is predicted."""
    tokens = collate_fn(samples, pad_id)
    return torch.nn.functional.pad(tokens, (0, max(2 - tokens.shape[1], 0)), value=pad_id)


def _capacity(lengths: np.ndarray, batch_size: int) -> int:
    """Tokens of a packed batch: a multiple of 64, and room for the longest sample."""
    tokens = max(round(min(batch_size, len(lengths)) * float(lengths.mean())), int(lengths.max()))
    return -(-tokens // 64) * 64
