"""Distribution of positions over ranks and DataLoader workers, each position once, and shuffling.

    stream = Stream(reader, order="shuffled", seed=0)
    for epoch in range(epochs):
        stream.set_epoch(epoch)
        for batch in DataLoader(stream, batch_size=64, num_workers=4, collate_fn=collate): ...

Shares differ by at most one position, for any number of shards, even fewer than workers. A share consists of full
shards and parts of at most two.

order         what is read                                                        how well it mixes
sequential    each share in order                                                 not at all
shuffled      shards in random order, each in order, through a buffer             within the buffer; across shards
random        single samples, by position                                         every order is equally likely
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple, TypeVar

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import IterableDataset

from ...lab.arguments import check_at_least, check_choice
from ...lab.ranks import Place, rank_of, worker_of
from .dataset import Reader, Sample

Item = TypeVar("Item")
ORDERS = ("sequential", "shuffled", "random")


class Stream(IterableDataset):
    """An iterable of a reader's samples: the share of this rank and DataLoader worker.

    The order depends on seed and epoch, and for `shuffled` on the number of workers. `set_epoch` also works with
    persistent workers. Rank and number of ranks are torch.distributed's unless given. `transform` is applied in the
    worker.
    """

    def __init__(
        self,
        reader: Reader,
        order: str = "sequential",
        *,
        buffer: int = 1000,
        seed: int = 0,
        rank: int | None = None,
        world_size: int | None = None,
        transform: Callable[[Sample], object] | None = None,
    ) -> None:
        check_choice(ORDERS, order=order)
        check_at_least(1, buffer=buffer)
        self.reader, self.order, self.buffer, self.seed, self.transform = reader, order, buffer, seed, transform
        self.rank, self.world_size = rank_of(rank, world_size)
        self._place = Place()

    def set_epoch(self, epoch: int) -> None:
        """The epoch of the passes that begin from now on."""
        self._place.set_epoch(epoch)

    def __len__(self) -> int:
        """The number of items of this rank, over all workers."""
        return sum(map(len, self._share([range(len(self.reader))], 0, 1)))

    def _share(self, runs: Sequence[Sequence[int]], worker: int, workers: int) -> list[Sequence[int]]:
        return shard(shard(runs, self.rank, self.world_size), worker, workers)

    def __iter__(self) -> Iterator:
        items = self._items(self._place.epoch, *worker_of())
        return items if self.transform is None else map(self.transform, items)

    def _items(self, epoch: int, worker: int, workers: int) -> Iterator[Sample]:
        rng = np.random.default_rng([self.seed, epoch])  # the same on all ranks and workers, which split one order
        runs: list[Sequence[int]] = list(self.reader.shards)
        if self.order == "random":
            runs = [rng.permutation(len(self.reader)).tolist()]
        elif self.order == "shuffled":
            runs = [runs[at] for at in rng.permutation(len(runs))]
        pieces = self._share(runs, worker, workers)
        if self.order == "random":
            return (self.reader[position] for piece in pieces for position in piece)
        if self.order == "sequential":
            return iter(self.reader.stream(pieces))
        own = np.random.default_rng([self.seed, epoch, self.rank, worker])
        return shuffled(self.reader.stream(pieces), self.buffer, own)


def shard(runs: Sequence[Sequence[int]], part: int, parts: int) -> list[Sequence[int]]:
    """Part `part` of `parts` of the positions in `runs`, in order, as slices of the runs.

    Parts are disjoint, together complete, and differ by at most one position. A part can be split again: first over
    ranks, then each rank's part over its workers.
    """
    total = sum(map(len, runs))
    low, high = total * part // parts, total * (part + 1) // parts
    pieces, at = [], 0
    for run in runs:
        pieces.append(run[max(low - at, 0) : max(high - at, 0)])
        at += len(run)
    return [piece for piece in pieces if len(piece)]


def shuffled(items: Iterable[Item], buffer: int, rng: np.random.Generator) -> Iterator[Item]:
    """Each item once, drawn at random from a buffer of `buffer` items, which are in memory.

    An item comes at most `buffer` positions early; its delay is unbounded, but `buffer` positions on average.
    """
    buffered: list[Item] = []
    for item in items:
        if len(buffered) < buffer:
            buffered.append(item)
            continue
        at = int(rng.integers(buffer))
        drawn, buffered[at] = buffered[at], item
        yield drawn
    yield from (buffered[at] for at in rng.permutation(len(buffered)))


class Batch(NamedTuple):
    keys: list[str]
    labels: Tensor  # (B,) int64
    data: list[np.ndarray]  # B arrays (n_i,)


def collate(samples: Iterable[Sample]) -> Batch:
    keys, labels, data = map(list, zip(*samples, strict=True))
    return Batch(keys, torch.tensor(labels, dtype=torch.int64), data)
