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
from torch.utils.data import IterableDataset, get_worker_info

from helpers.lab.arguments import check_choice, check_positive

from .dataset import Fault, Reader, Sample

Item = TypeVar("Item")
ORDERS = ("sequential", "shuffled", "random")


class Stream(IterableDataset):
    """An iterable of a reader's samples and faults: the share of this rank and DataLoader worker.

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
        ranks: int | None = None,
        transform: Callable[[Sample], object] | None = None,
    ) -> None:
        check_choice(ORDERS, order=order)
        check_positive(buffer=buffer)
        self.reader, self.order, self.buffer, self.seed, self.transform = reader, order, buffer, seed, transform
        self.rank, self.ranks = _distributed(rank, ranks)
        self._epoch = torch.zeros((), dtype=torch.int64).share_memory_()

    def set_epoch(self, epoch: int) -> None:
        self._epoch.fill_(epoch)

    def __len__(self) -> int:
        """The number of items of this rank, over all workers."""
        return sum(map(len, shard([range(len(self.reader))], self.rank, self.ranks)))

    def __iter__(self) -> Iterator:
        info, epoch = get_worker_info(), int(self._epoch)
        worker, workers = (info.id, info.num_workers) if info else (0, 1)
        rng = np.random.default_rng([self.seed, epoch])  # the same on all ranks and workers, which split one order
        runs: list[Sequence[int]] = list(self.reader.shards)
        if self.order == "random":
            runs = [rng.permutation(len(self.reader)).tolist()]
        elif self.order == "shuffled":
            runs = [runs[at] for at in rng.permutation(len(runs))]
        pieces = shard(shard(runs, self.rank, self.ranks), worker, workers)
        if self.order == "random":
            items = (self.reader[position] for piece in pieces for position in piece)
        else:
            items = self.reader.stream(pieces)
        if self.order == "shuffled":
            items = shuffled(items, self.buffer, np.random.default_rng([self.seed, epoch, self.rank, worker]))
        if self.transform is None:
            return iter(items)
        return (item if isinstance(item, Fault) else self.transform(item) for item in items)


def shard(runs: Sequence[Sequence[int]], part: int, parts: int) -> list[Sequence[int]]:
    """Part `part` of `parts` of the positions in `runs`, in order, as slices of the runs.

    Parts are disjoint, together complete, and differ by at most one position. A part can be split again: first over
    ranks, then each rank's part over its workers.
    """
    if not 0 <= part < parts:
        raise ValueError(f"part is {part} of {parts}; valid: 0 to {parts - 1}")
    total = sum(map(len, runs))
    low, high = total * part // parts, total * (part + 1) // parts
    pieces, at = [], 0
    for run in runs:
        piece = run[max(low - at, 0) : max(high - at, 0)]
        if len(piece):
            pieces.append(piece)
        at += len(run)
    return pieces


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
    faults: list[Fault]


def collate(items: Iterable[Sample | Fault]) -> Batch:
    """A batch of samples, with its faults in a separate list, so that workers can pass them to the main process."""
    faults: list[Fault] = []
    samples = list(whole(items, faults))
    labels = torch.tensor([sample.label for sample in samples], dtype=torch.int64)
    return Batch([sample.key for sample in samples], labels, [sample.data for sample in samples], faults)


def whole(items: Iterable[Sample | Fault], faults: list[Fault]) -> Iterator[Sample]:
    """The samples among items; faults are appended to the list."""
    for item in items:
        if isinstance(item, Fault):
            faults.append(item)
        else:
            yield item


def _distributed(rank: int | None, ranks: int | None) -> tuple[int, int]:
    """Rank and number of ranks: as given, else torch.distributed's, else 0 of 1."""
    running = torch.distributed.is_available() and torch.distributed.is_initialized()
    ranks = ranks if ranks is not None else torch.distributed.get_world_size() if running else 1
    rank = rank if rank is not None else torch.distributed.get_rank() if running else 0
    if not 0 <= rank < ranks:
        raise ValueError(f"rank is {rank} of {ranks}; valid: 0 to {ranks - 1}")
    return rank, ranks
