"""Batches as one long sequence each: documents one after another, and no padding.

    dataset = SequencedDataset(corpus, batch_size=None, max_length=2048, strategy="best-fit", fixed=True)
    loader = DataLoader(dataset, batch_size=None, num_workers=2, pin_memory=True, persistent_workers=True)
    for epoch in range(epochs):
        dataset.set_epoch(epoch)
        for packed in loader:
            logits = model(packed.tokens[None], positions=packed.positions)
            loss = criterion(logits, packed.targets()[None])

`batch_size=None` in the loader says that what the dataset yields is a batch already.

The whole epoch is planned before its first sequence, by every worker for itself, from the samples' lengths alone: 0.2 s
and 32 MB for a million samples. Of that plan each rank takes every `world_size`-th sequence, and each of its
workers every `num_workers`-th of these. So nothing has to be agreed on between processes, the loader gives the same
sequences in the same order however many workers it has, and the number of sequences is known in advance.

`Packed` is such a batch; `PackedLayout` says where its documents lie, which is all that attention has to know of it.
"""

import operator
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import IterableDataset, get_worker_info

from helpers.lab.arguments import check_at_least, check_choice

from .datasets import Sample, check_rank, lengths_of, token_ids
from .packing import STRATEGIES, Plan, plan_packs, plan_stream, split_evenly

LAST = ("carry", "crop", "drop")
PADDING = -1  # the document that padding belongs to


@dataclass(frozen=True, eq=False)
class PackedLayout:
    """Documents one after another in one sequence of T positions; document i is `offsets[i]` to `offsets[i + 1]`.

        layout = PackedLayout([0, 3, 7, 8])      # three documents, of 3, 4 and 1 tokens; T = 8
        layout = PackedLayout([0, 3, 7], 10)     # two documents, and 3 positions of padding; T = 10

    `offsets` are whole numbers on the host that start at 0, never descend, and end at T, or, where `length` is given,
    at the padding: to attention that is one document more. Everything here is numpy on the host, so that asking never
    waits for a GPU, and is worked out when it is first asked for, in O(T).
    """

    offsets: np.ndarray  # (documents + 1,) int32

    def __init__(self, offsets: Sequence[int] | np.ndarray | Tensor, length: int | None = None) -> None:
        object.__setattr__(self, "offsets", _checked_offsets(offsets, length))

    def __len__(self) -> int:
        """T, all documents together."""
        return int(self.offsets[-1])

    @cached_property
    def lengths(self) -> np.ndarray:
        """(documents,) int32."""
        return np.diff(self.offsets)

    @cached_property
    def documents(self) -> np.ndarray:
        """(T,) int32: the number of the document at each position."""
        return np.repeat(np.arange(len(self.lengths), dtype=np.int32), self.lengths)

    @cached_property
    def positions(self) -> np.ndarray:
        """(T,) int64: the place of each token in its own document, as a model of positions reads it."""
        return np.arange(len(self)) - np.repeat(self.offsets[:-1], self.lengths)


def _checked_offsets(offsets: Sequence[int] | np.ndarray | Tensor, length: int | None) -> np.ndarray:
    """The offsets of a layout as int32, the padding as a last document; a ValueError names what is wrong."""
    if isinstance(offsets, Tensor) and not offsets.is_cpu:
        raise ValueError(f"offsets lie on {offsets.device}, where reading them waits for it; pass them from the host")
    array = np.asarray(offsets)
    if array.ndim != 1 or len(array) < 2 or array.dtype.kind not in "iu":
        raise ValueError(
            f"offsets are {array.dtype} of shape {array.shape}; they must be whole numbers, the start of each document "
            "and the end of the last"
        )
    if array[0] != 0:
        raise ValueError(f"offsets start at {array[0]}; they must start at 0")
    if (falls := array[1:] < array[:-1]).any():
        at = int(falls.argmax())
        raise ValueError(f"offsets fall from {array[at]} to {array[at + 1]} at place {at + 1}; they must not descend")
    length = array[-1] if length is None else length
    check_at_least(array[-1], length=length)
    if not 1 <= length < 2**31:
        raise ValueError(f"the sequence has {length} positions; allowed: 1 to {2**31 - 1}")
    array = (np.append(array, length) if array[-1] < length else array).astype(np.int32)  # a copy, whatever it was
    array.setflags(write=False)
    return array


class Packed(NamedTuple):
    """Documents of T tokens together, without a batch dimension: `packed.tokens[None]` is what a model takes.

    20 bytes a token and 4 a document. It is a tuple of tensors, so that a `DataLoader` pins it as it does any other.
    Workers send it by value: sharing the memory of four small tensors takes four times as long.

    Padding, if there is any, stands at the end, after `offsets[-1]`, as a document of its own.
    """

    tokens: Tensor  # (T,) int64
    offsets: Tensor  # (documents + 1,) int32: document d is tokens[offsets[d] : offsets[d + 1]]
    documents: Tensor  # (T,) int32: which document each token is of; −1 for padding
    positions: Tensor  # (T,) int64: where in its document each token stands; 0 in the padding

    def targets(self, pad_id: int = 0) -> Tensor:
        """(T,) What language modelling predicts at each token: the next one of its document.

        `pad_id` where there is none, after a document's last token and in the padding, as `LMCrossEntropyLoss` takes
        it. `torch.nn.functional.cross_entropy` ignores -100.
        """
        following = self.tokens.new_full(self.tokens.shape, pad_id)
        inside = (self.documents[1:] == self.documents[:-1]) & (self.documents[1:] != PADDING)
        following[:-1] = torch.where(inside, self.tokens[1:], pad_id)
        return following

    def to(self, device: torch.device | str, non_blocking: bool = False) -> "Packed":
        """The same on another device."""
        return Packed(*(part.to(device, non_blocking=non_blocking) for part in self))

    def pin_memory(self) -> "Packed":
        return Packed(*(part.pin_memory() for part in self))

    def mask(self) -> Tensor:
        """(T, T) Which key, the column, each query may look at; see `causal_mask`. T² bytes."""
        return causal_mask(self.documents)

    def layout(self) -> PackedLayout:
        """Where the documents lie, for attention; the padding is one more. For tensors on the host: it reads them."""
        return PackedLayout(self.offsets, len(self.tokens))

    def __reduce__(self) -> tuple:
        return _unpickled, tuple(part.numpy() if part.is_cpu else part for part in self)


def _unpickled(*parts: Tensor | np.ndarray) -> Packed:
    return Packed(*(torch.from_numpy(part) if isinstance(part, np.ndarray) else part for part in parts))


def join(tokens: np.ndarray, lengths: np.ndarray, *, length: int | None = None, pad_id: int = 0) -> Packed:
    """The packed sequence of documents of these lengths, whose tokens stand one after another in `tokens`.

    With `length` it is padded to that many tokens. 15 µs and 10 ns a token.
    """
    total = len(tokens)
    offsets = np.concatenate([[0], np.cumsum(lengths)])
    length = total if length is None else length
    sizes = np.append(lengths, length - total)  # the last document is the padding
    positions = np.arange(length) - np.repeat(offsets, sizes)
    positions[total:] = 0  # a model's table of positions ends at its longest document
    documents = np.arange(len(sizes), dtype=np.int32)
    documents[-1] = PADDING
    padded = np.full(length, pad_id, dtype=np.int64)
    padded[:total] = tokens
    return Packed(
        tokens=torch.from_numpy(padded),
        offsets=torch.from_numpy(offsets.astype(np.int32)),
        documents=torch.from_numpy(np.repeat(documents, sizes)),
        positions=torch.from_numpy(positions),
    )


def causal_mask(documents: Tensor) -> Tensor:
    """(T, T) True where a query, the row, may look at a key: one of its own document that does not come after it.

    As `scaled_dot_product_attention` takes it. Padding looks at padding, so that no row is empty and no NaN arises. It
    costs T² bytes: 4 MiB at T = 2,048, so make it where it is used, from `documents`, rather than send it there.
    """
    return (documents[:, None] == documents[None, :]).tril_()


class SequencedDataset(IterableDataset[Packed]):
    """Sequences of at most `max_length` tokens, made of whole samples in random order.

    A sequence closes when it holds `batch_size` samples (None: however many), or when the next sample doesn't fit, and
    `last` says what becomes of that one:

        carry   it begins the next sequence; nothing is lost
        crop    it is cut to the room that is left, and its rest is lost; samples longer than `max_length` are cut too
        drop    it is lost

    If no room is left at all, nothing is cropped or dropped: the sample begins the next sequence.

    With a `strategy` of `pack`, the whole epoch is packed by it, the packs come in random order, and nothing is lost.
    "greedy" takes the samples shuffled, as no strategy does. With the others, only equally long samples change places
    from epoch to epoch, and a sequence holds samples of like length, the longest first: random is only which of them.

    An epoch is the same for the same seed. It doesn't advance by itself: call `set_epoch` before each pass. That
    reaches workers that live on from epoch to epoch, too.

    Each sample comes once over all ranks, and ranks get equally many sequences: up to `world_size` − 1 of those
    with the most documents are split in two. Only if each sequence is a single document may ranks differ by one.

    `fixed=True` pads to `max_length`, so that the tensors of a token each keep their shapes and compiled code is
    compiled once; `offsets` still has one entry a document.

    Samples are a corpus of `helpers.text`, or anything with a length whose elements are token ids. Of a corpus
    a sequence is gathered in one go from its flat `ids`. Of anything else each sample is looked at once when the
    dataset is made, unless it has `lengths`.
    """

    def __init__(
        self,
        samples: Sequence[Sample],
        batch_size: int | None,
        max_length: int,
        *,
        last: str = "carry",
        strategy: str | None = None,
        seed: int = 0,
        pad_id: int = 0,
        fixed: bool = False,
        rank: int = 0,
        world_size: int = 1,
    ) -> None:
        check_at_least(1, max_length=max_length, batch_size=1 if batch_size is None else batch_size)
        check_at_least(0, seed=seed)
        check_rank(rank, world_size)
        self.samples, self.pad_id, self.fixed = samples, pad_id, fixed
        self.batch_size, self.max_length, self.seed = batch_size, operator.index(max_length), seed
        self.rank, self.world_size = rank, world_size
        self.last, self.strategy = last, strategy
        self._check_choices()
        self.lengths = lengths_of(samples)
        self._check_samples()
        self._source = _flat(samples, self.lengths)
        self._epoch = torch.zeros((), dtype=torch.int64).share_memory_()  # workers see what set_epoch writes
        self._planned: tuple[int, Plan] | None = None

    def set_epoch(self, epoch: int) -> None:
        """The epoch of the passes that begin from now on."""
        check_at_least(0, epoch=epoch)
        self._epoch.fill_(epoch)

    def __len__(self) -> int:
        """This rank's sequences in the epoch. Epochs differ a little, so ask anew in each, as progress bars do:
        a `DataLoader` warns when there are more than it last told."""
        return len(range(self.rank, len(self._plan(int(self._epoch))), self.world_size))

    def __iter__(self) -> Iterator[Packed]:
        return self._sequences(int(self._epoch))  # read now: a worker may get to its first sequence much later

    def statistics(self) -> dict[str, float]:
        """The epoch over all ranks: what it holds, what is lost, how full sequences are. Looks at no token."""
        plan = self._plan(int(self._epoch))
        tokens, whole = int(plan.sizes.sum()), int(self.lengths.sum())
        fill = tokens / (len(plan) * self.max_length)
        return {
            "sequences": len(plan),
            "samples": len(plan.order),
            "tokens": tokens,
            "lost_samples": len(self.lengths) - len(plan.order),
            "lost_tokens": whole - tokens,
            "lost_share": (whole - tokens) / max(whole, 1),
            "fill": fill,
            "padding_share": 1 - fill if self.fixed else 0.0,
        }

    def _sequences(self, epoch: int) -> Iterator[Packed]:
        plan = self._plan(epoch)
        worker = get_worker_info()
        number, workers = (0, 1) if worker is None else (worker.id, worker.num_workers)
        for index in range(self.rank + self.world_size * number, len(plan), self.world_size * workers):
            documents = slice(plan.begins[index], plan.ends[index])
            yield self._sequence(plan.order[documents], plan.sizes[documents])

    def _sequence(self, indices: np.ndarray, sizes: np.ndarray) -> Packed:
        """The first `sizes` tokens of these samples, joined."""
        if self._source is not None:
            ids, offsets = self._source
            starts = offsets[indices]
            tokens = np.concatenate([ids[a:b] for a, b in zip(starts.tolist(), (starts + sizes).tolist(), strict=True)])
        else:
            tokens = self._concatenated(indices.tolist(), sizes.tolist())
        length = self.max_length if self.fixed else None
        return join(tokens, sizes, length=length, pad_id=self.pad_id)

    def _concatenated(self, indices: list[int], sizes: list[int]) -> np.ndarray:
        parts = [np.empty(0, np.int64)]
        for index, size in zip(indices, sizes, strict=True):
            part = token_ids(self.samples[index], f"sample {index}")
            if len(part) != self.lengths[index]:
                raise ValueError(f"sample {index} has {len(part)} tokens, and had {self.lengths[index]} at first")
            parts.append(part[:size].astype(np.int64, copy=False))
        return np.concatenate(parts)

    def _plan(self, epoch: int) -> Plan:
        """The epoch's plan over all ranks; the last one is kept."""
        if self._planned is None or self._planned[0] != epoch:
            random = np.random.default_rng((self.seed, epoch))
            order = random.permutation(len(self.lengths))
            if self.strategy is None:
                plan = plan_stream(order, self.lengths, self.max_length, self.batch_size, self.last)
            else:
                plan = plan_packs(order, self.lengths, self.max_length, self.strategy, random)
            plan = split_evenly(plan, self.world_size)
            if len(plan) < self.world_size:
                raise ValueError(f"world_size is {self.world_size}; there are only {len(plan)} sequences to share")
            self._planned = epoch, plan
        return self._planned[1]

    def _check_choices(self) -> None:
        check_choice(LAST, last=self.last)
        if self.strategy is None:
            return
        check_choice(STRATEGIES, strategy=self.strategy)
        if self.batch_size is not None:
            raise ValueError(
                f"batch_size is {self.batch_size}; it must be None with strategy={self.strategy!r}, "
                "which puts as many samples together as fit"
            )
        if self.last != "carry":
            raise ValueError(f"last is {self.last!r}; it must be 'carry' with a strategy, which loses nothing")

    def _check_samples(self) -> None:
        if not len(self.lengths):
            raise ValueError("there are no samples; the dataset must hold at least one")
        if len(self.lengths) < self.world_size:
            raise ValueError(f"world_size is {self.world_size}; there are only {len(self.lengths)} samples to share")
        if self.last != "crop" and self.lengths.max() > self.max_length:
            longest = int(self.lengths.argmax())
            raise ValueError(
                f"sample {longest} has {self.lengths[longest]} tokens and max_length is {self.max_length}; "
                "cut the samples (StandardDataset does), raise max_length, or choose last='crop'"
            )


def _flat(samples: Sequence[Sample], lengths: np.ndarray) -> tuple[np.ndarray, np.ndarray] | None:
    """A corpus's ids and where each sample begins in them, if that is how the samples lie."""
    ids, offsets = getattr(samples, "ids", None), getattr(samples, "offsets", None)
    if not (isinstance(ids, np.ndarray) and isinstance(offsets, np.ndarray) and ids.dtype.kind in "iu"):
        return None
    return (ids, offsets) if np.array_equal(np.diff(offsets), lengths) else None
