"""Distribution of positions over ranks and DataLoader workers, each position once, in order or at random.

    stream = Stream(reader, order="random", seed=0)
    for epoch in range(epochs):
        stream.set_epoch(epoch)
        for batch in DataLoader(stream, batch_size=64, num_workers=4, collate_fn=collate): ...

Shares differ by at most one position, for any number of shards, even fewer than workers. A share consists of full
shards and parts of at most two.

order         what is read                     how well it mixes
sequential    each share in order              not at all
random        single samples, by position      every order is equally likely
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import IterableDataset

from ...lab.arguments import check_choice
from ...lab.ranks import Place, rank_of, worker_of
from .dataset import Reader, Sample

ORDERS = ("sequential", "random")


class Stream(IterableDataset):
    """An iterable of a reader's samples: the share of this rank and DataLoader worker.

    The order depends on seed and epoch. `set_epoch` also works with persistent workers. Rank and number of ranks are
    torch.distributed's unless given. `transform` is applied in the worker.
    """

    def __init__(
        self,
        reader: Reader,
        order: str = "sequential",
        *,
        seed: int = 0,
        rank: int | None = None,
        world_size: int | None = None,
        transform: Callable[[Sample], object] | None = None,
    ) -> None:
        check_choice(ORDERS, order=order)
        self.reader, self.order, self.seed, self.transform = reader, order, seed, transform
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
        if self.order == "sequential":
            return iter(self.reader.stream(self._share(self.reader.shards, worker, workers)))
        rng = np.random.default_rng([self.seed, epoch])  # the same on all ranks and workers, which split one order
        pieces = self._share([rng.permutation(len(self.reader)).tolist()], worker, workers)
        return (self.reader[position] for piece in pieces for position in piece)


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


class Batch(NamedTuple):
    keys: list[str]
    labels: Tensor  # (B,) int64
    data: list[np.ndarray]  # B arrays (n_i,)


def collate(samples: Iterable[Sample]) -> Batch:
    keys, labels, data = map(list, zip(*samples, strict=True))
    return Batch(keys, torch.tensor(labels, dtype=torch.int64), data)
