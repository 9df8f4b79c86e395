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

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import IterableDataset

from helpers.lab.arguments import check_choice, check_positive
from helpers.lab.ranks import Place, check_identity, rank_of, worker_of

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
        world_size: int | None = None,
        transform: Callable[[Sample], object] | None = None,
    ) -> None:
        check_choice(ORDERS, order=order)
        check_positive(buffer=buffer)
        self.reader, self.order, self.buffer, self.seed, self.transform = reader, order, buffer, seed, transform
        self.rank, self.world_size = rank_of(rank, world_size)
        self._place = Place()

    def set_epoch(self, epoch: int) -> None:
        """The epoch of the passes that begin from now on."""
        self._place.set_epoch(epoch)

    def state_dict(self) -> dict[str, Any]:
        """The place of the last pass in this process: `position` counts its items, faults among them.

        In a loader's workers each has its own, which `StatefulDataLoader` collects.
        """
        return self._identity() | self._place.state()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Let the next pass go on from there; `shuffled` reads again what lies before it.

        A ValueError if the state is of another stream, or of another worker.
        """
        check_identity(state, self._identity(), "stream")
        if (state.get("worker"), state.get("workers")) != worker_of():
            raise ValueError(f"the state is of worker {state.get('worker')} of {state.get('workers')}; load it there")
        total = sum(map(len, self._share([range(len(self.reader))], *worker_of())))
        if state["position"] > total:
            raise ValueError(f"position is {state['position']}; the share has {total} items")
        self._place.load(state, ended=state["position"] == total)

    def _identity(self) -> dict[str, Any]:
        names = ("order", "buffer", "seed", "rank", "world_size")
        return {name: getattr(self, name) for name in names} | {"lengths": [len(run) for run in self.reader.shards]}

    def __len__(self) -> int:
        """The number of items of this rank, over all workers."""
        return sum(map(len, self._share([range(len(self.reader))], 0, 1)))

    def _share(self, runs: Sequence[Sequence[int]], worker: int, workers: int) -> list[Sequence[int]]:
        return shard(shard(runs, self.rank, self.world_size), worker, workers)

    def __iter__(self) -> Iterator:
        epoch, resume = self._place.begin()
        worker, workers = worker_of()
        if resume is not None and (resume["worker"], resume["workers"]) != (worker, workers):
            raise ValueError("the state was loaded outside of the workers; a StatefulDataLoader loads it in each")
        done = resume["position"] if resume else 0
        self._place.reach(epoch, done)
        return self._given(self._items(epoch, worker, workers, done), epoch, done)

    def _given(self, items: Iterable[Sample | Fault], epoch: int, position: int) -> Iterator:
        for item in items:
            item = item if isinstance(item, Fault) or self.transform is None else self.transform(item)
            position += 1
            self._place.reach(epoch, position)
            yield item

    def _items(self, epoch: int, worker: int, workers: int, done: int) -> Iterator[Sample | Fault]:
        """This worker's items after the first `done`."""
        rng = np.random.default_rng([self.seed, epoch])  # the same on all ranks and workers, which split one order
        runs: list[Sequence[int]] = list(self.reader.shards)
        if self.order == "random":
            runs = [rng.permutation(len(self.reader)).tolist()]
        elif self.order == "shuffled":
            runs = [runs[at] for at in rng.permutation(len(runs))]
        pieces = self._share(runs, worker, workers)
        if self.order == "shuffled":
            own = np.random.default_rng([self.seed, epoch, self.rank, worker])
            return itertools.islice(shuffled(self.reader.stream(pieces), self.buffer, own), done, None)
        pieces = _between(pieces, done, len(self.reader))
        if self.order == "random":
            return (self.reader[position] for piece in pieces for position in piece)
        return iter(self.reader.stream(pieces))


def shard(runs: Sequence[Sequence[int]], part: int, parts: int) -> list[Sequence[int]]:
    """Part `part` of `parts` of the positions in `runs`, in order, as slices of the runs.

    Parts are disjoint, together complete, and differ by at most one position. A part can be split again: first over
    ranks, then each rank's part over its workers.
    """
    if not 0 <= part < parts:
        raise ValueError(f"part is {part} of {parts}; valid: 0 to {parts - 1}")
    total = sum(map(len, runs))
    return _between(runs, total * part // parts, total * (part + 1) // parts)


def _between(runs: Iterable[Sequence[int]], low: int, high: int) -> list[Sequence[int]]:
    """Positions low to high of the runs one after the other, as slices of the runs."""
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
    faults: list[Fault]


def collate(items: Iterable[Sample | Fault]) -> Batch:
    """A batch of samples, with its faults in a separate list, so that workers can pass them to the main process."""
    items = list(items)
    samples = [item for item in items if not isinstance(item, Fault)]
    labels = torch.tensor([sample.label for sample in samples], dtype=torch.int64)
    faults = [item for item in items if isinstance(item, Fault)]
    return Batch([sample.key for sample in samples], labels, [sample.data for sample in samples], faults)
