"""Batches of text on the device: padded, of similar lengths, or packed.

    batches, steps = random_batches(StandardDataset(text), 32, device, torch.bfloat16, seed=0)
    for batch in batches(epoch): ...

An epoch of any of them covers all samples, cut to the same length, so it has equally many real tokens, and a step has
equally many on average. The order follows from seed and epoch alone.
"""

import functools
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Sampler

from ..batching import BalancedBatchSampler, BaseDataset, SequencedDataset, StandardDataset, collate_fn
from ..batching.attention import causal_attention, missing_because, packed_attention
from ..batching.packed import Packed
from ..text import Samples
from .slow_parts import hidden_keys, materialised_attention
from .task import Batch

SPREAD = 10  # the largest difference of lengths in a balanced batch
# Padded to the longest sample of the batch, padded to the maximum length, of similar lengths, packed.
DATA = ("standard", "base", "balanced", "sequenced")

# (batches(epoch), steps(epoch)): an epoch's batches, and how many it has
Feed = tuple[Callable[[int], Iterator[Batch]], Callable[[int], int]]


class RandomOrder(Sampler[list[int]]):
    """Random batches of indices, by seed and epoch alone; the last may be smaller.

    `set_epoch` is as in `BalancedBatchSampler`.
    """

    def __init__(self, count: int, batch_size: int, seed: int) -> None:
        self.count, self.batch_size, self.seed, self.epoch = count, batch_size, seed, 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __len__(self) -> int:
        return -(-self.count // self.batch_size)

    def __iter__(self) -> Iterator[list[int]]:
        order = shuffled(self.count, self.seed, self.epoch).split(self.batch_size)
        return (part.tolist() for part in order)


def shuffled(size: int, seed: int, epoch: int) -> Tensor:
    """The order of an epoch, the same in each run."""
    return torch.randperm(size, generator=torch.Generator().manual_seed(1_000_003 * seed + epoch))


def random_batches(
    dataset: StandardDataset,
    size: int,
    device: torch.device,
    dtype: torch.dtype,
    seed: int,
    to_maximum: bool = False,
    **loading: Any,
) -> Feed:
    """Random batches, padded to the longest sample of each, or to the dataset's maximum length if `to_maximum`."""
    order = RandomOrder(len(dataset), size, seed)
    loaded = _loaded(_padded(dataset, to_maximum), device, dataset.pad_id, batch_sampler=order, **loading)
    return _by_epoch(order, loaded)


def balanced_batches(
    dataset: StandardDataset,
    size: int,
    device: torch.device,
    dtype: torch.dtype,
    seed: int,
    k: int = SPREAD,
    **loading: Any,
) -> Feed:
    """Random batches of lengths that differ by at most k, padded to the longest sample of each."""
    order = BalancedBatchSampler(dataset.lengths, size, k, seed)
    return _by_epoch(order, _loaded(dataset, device, dataset.pad_id, batch_sampler=order, **loading))


def packed_batches(
    dataset: StandardDataset,
    size: int,
    device: torch.device,
    dtype: torch.dtype,
    seed: int,
    variant: str | None = None,
    multiple: int = 1,
    strategy: str = "best-fit",
    **loading: Any,
) -> Feed:
    """One packed sequence a step, with as many tokens as padded batches have real tokens on average.

    `variant` is that of attention, by default the fastest that runs. The sequence is at least as long as the longest
    sample, and its length is a multiple of `multiple`.
    """
    longest = dataset.max_length if multiple == 1 else int(dataset.lengths.max())
    capacity = max(round(min(size, len(dataset)) * float(dataset.lengths.mean())), longest)
    capacity = -(-capacity // multiple) * multiple
    packed = SequencedDataset(dataset, None, capacity, strategy=strategy, seed=seed, pad_id=dataset.pad_id, fixed=True)
    variant = variant or packed_variant(device, dtype)
    return _by_epoch(packed, _loaded(packed, device, dataset.pad_id, batch_size=None, variant=variant, **loading))


def _by_epoch(
    order: RandomOrder | BalancedBatchSampler | SequencedDataset, loaded: Callable[[], Iterator[Batch]]
) -> Feed:
    """An epoch's batches, and how many it has, where what is loaded follows from `order`, a course's among them."""
    begin = getattr(order, "set_epoch", lambda epoch: None)

    def batches(epoch: int) -> Iterator[Batch]:
        begin(epoch)
        return loaded()

    def steps(epoch: int) -> int:
        begin(epoch)
        return len(order) if hasattr(order, "__len__") else sum(1 for _ in order)

    return batches, steps


def full_batch(text: Samples, size: int, length: int, device: torch.device) -> Batch:
    """A batch of samples that are all `length` long: the text, cut anywhere."""
    tokens = torch.from_numpy(text.ids[: size * (length + 1)].astype(np.int64)).view(size, -1)
    tokens = tokens.to(device)  # (B, T + 1)
    return Batch(tokens[:, :-1], tokens[:, 1:], {"attend": causal_attention})


FEEDS = {
    "standard": random_batches,
    "base": functools.partial(random_batches, to_maximum=True),
    "balanced": balanced_batches,
    "within 1": functools.partial(balanced_batches, k=1),
    "within 50": functools.partial(balanced_batches, k=50),
    "sequenced": packed_batches,
}


def packed_variant(device: torch.device, dtype: torch.dtype) -> str:
    """The fastest attention over packed documents that runs on the device with this type."""
    return next(name for name in ("varlen", "flex", "dense") if not missing_because(name, device, dtype))


def batches_in_order(
    dataset: StandardDataset, size: int, device: torch.device, to_maximum: bool = False, **loading: Any
) -> Callable[[], Iterator[Batch]]:
    """Validation batches: padded, in the order of the text, the same whatever the training batches are."""
    return _loaded(_padded(dataset, to_maximum), device, dataset.pad_id, batch_size=size, **loading)


def _padded(dataset: StandardDataset, to_maximum: bool) -> StandardDataset:
    return BaseDataset(dataset.samples, dataset.max_length, pad_id=dataset.pad_id) if to_maximum else dataset


def _loaded(
    dataset: Any,
    device: torch.device,
    pad_id: int,
    *,
    workers: int = 0,
    pinned: bool = True,
    materialised: bool = False,
    variant: str = "dense",
    **batching: Any,
) -> Callable[[], Iterator[Batch]]:
    """The batches of a `DataLoader`, copied to the device, with the attention that suits them."""
    pinned = pinned and device.type == "cuda"
    loader = DataLoader(
        dataset,
        collate_fn=None if isinstance(dataset, SequencedDataset) else functools.partial(_collate, pad_id=pad_id),
        num_workers=workers,
        pin_memory=pinned,
        persistent_workers=workers > 0,
        prefetch_factor=4 if workers else None,
        generator=torch.Generator(),  # else each epoch would advance the generator that dropout uses
        **batching,
    )

    def on_device(loaded: Tensor | Packed) -> Batch:
        """Real tokens are counted by numpy: `diagnose` would report reading a tensor as a wait for the device."""
        copied = loaded.to(device, non_blocking=pinned)
        if isinstance(loaded, Packed):
            offsets = loaded.offsets.numpy()
            real = int(offsets[-1]) - (len(offsets) - 1)  # the last token of each document has no target
            tokens, targets, options = copied.tokens[None], copied.targets(pad_id)[None], {}  # (1, T)
            options["positions"] = copied.positions
            attend = None if materialised else packed_attention(loaded.layout(), variant, device)
        else:
            real = int(np.count_nonzero(loaded.numpy()[:, 1:] != pad_id))
            tokens, targets, options = copied[:, :-1], copied[:, 1:], {}  # (B, T)
            attend = None if materialised else causal_attention
        options["attend"] = attend or materialised_attention(hidden_keys(tokens, options.get("positions")))
        return Batch(tokens, targets, options, real)

    return lambda: map(on_device, loader)


def _collate(samples: list[Tensor], pad_id: int) -> Tensor:
    """(B, T + 1), at least two tokens wide, so that something is predicted."""
    tokens = collate_fn(samples, pad_id)
    return torch.nn.functional.pad(tokens, (0, max(2 - tokens.shape[1], 0)), value=pad_id)
