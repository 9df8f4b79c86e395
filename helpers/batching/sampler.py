"""Batches of samples of nearly one length, in random order; a batch costs the same however many samples there are.

    lengths = [min(len(sample), 640) for sample in dataset]
    sampler = BalancedBatchSampler(lengths, batch_size=32, k=5)
    loader = DataLoader(dataset, batch_sampler=sampler, collate_fn=collate_fn)
    for epoch in range(epochs):
        sampler.set_epoch(epoch)
        for tokens in loader: ...

Three steps, of which only the first looks at every sample:

1. `__init__` sorts the samples by counting, O(n): one array of indices, in which each length owns a stretch. That
   is the hash table from a length to the indices of its samples, laid out flat.
2. An epoch lays *windows* over that array, O(number of lengths). A window is a stretch whose lengths differ by at most
   k; its samples are shuffled and cut into batches. It keeps as many samples as fill whole batches and leaves its
   longest few to the next window, so that a batch is short only where too few samples have lengths that near.
3. A batch is computed, O(batch_size): nothing is shuffled in memory, since `permuted` says which sample a place of the
   shuffled window holds. So a rank computes its own batches only, and a run resumes at any batch of an epoch.
"""

import operator
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NoReturn

import numpy as np
from torch.utils.data import Sampler

from ..lab.arguments import check_at_least
from ..lab.ranks import Place, check_identity, rank_of
from .datasets import LONGEST, Lengths, checked_lengths, checksum
from .packing import stable_argsort
from .permutations import GOLDEN, mixed, permuted, uint

MOST = 2**32  # samples: the permutations compute in 32 bits
BLOCK = 4096  # samples computed at once, or one batch: numpy's fixed costs are shared by the batches of a block


class BalancedBatchSampler(Sampler[list[int]]):
    """Random batches of indices whose lengths differ by at most `k`; every index exactly once an epoch.

    A batch has `batch_size` samples, fewer only where too few samples have lengths that near. With k at least the
    longest length less the shortest, batches are random over all samples.

    The order depends on the seed and the epoch only, and the epoch doesn't advance by itself: call `set_epoch` before
    each pass, or each has the same batches. Lightning, accelerate and transformers' Trainer call it themselves.

    Of `world_size` ranks (torch.distributed's unless given) each gets equally many batches, none of them twice (a few
    batches are then smaller), and in each step all ranks get batches of neighbouring lengths, so that none waits for
    another's longer one. A library that would share the batches between ranks once more meets a ValueError that names
    its flag.

    Memory: 6 bytes a sample. A million samples take 0.1 s to sort, an epoch some microseconds for each length that
    occurs, a batch of 32 a few microseconds.
    """

    def __init__(
        self,
        lengths: Lengths,
        batch_size: int,
        k: int,
        seed: int = 0,
        *,
        rank: int | None = None,
        world_size: int | None = None,
    ) -> None:
        lengths = checked_lengths(lengths)
        if not 0 < len(lengths) < MOST:
            raise ValueError(f"there are {len(lengths)} samples; allowed: 1 to {MOST - 1}")
        check_at_least(1, batch_size=batch_size)
        check_at_least(0, k=k, seed=seed)
        self.batch_size, self.seed = operator.index(batch_size), operator.index(seed)
        self.k = min(operator.index(k), LONGEST)  # no two lengths differ by more
        self._checksum = checksum(lengths)
        self._order, self._values, self._starts = _sorted(lengths, self.seed)
        counts = np.diff(self._starts)
        small = np.uint16 if len(counts) < 2**16 else np.uint32
        self._value = np.repeat(np.arange(len(counts), dtype=small), counts)  # (n,) which length each sorted sample has
        self._place = Place(rank, world_size)
        self._planned: tuple[tuple[int, int], _Windows, np.ndarray] | None = None
        self._windows(self.k)  # too many ranks are an error here, not in mid-training

    @property
    def epoch(self) -> int:
        """The epoch of the next pass."""
        return self._place.epoch

    def set_epoch(self, epoch: int) -> None:
        """The epoch that the next pass is. Another one than the present begins with its first batch."""
        self._place.set_epoch(epoch)

    @property
    def sampler(self) -> "BalancedBatchSampler":
        """Itself: Lightning sets the epoch of `loader.batch_sampler.sampler`."""
        return self

    @property
    def batch_sampler(self) -> "BalancedBatchSampler":
        """Itself: transformers' Trainer sets the epoch of `loader.batch_sampler.batch_sampler`."""
        return self

    @property
    def drop_last(self) -> NoReturn:
        """Read by libraries that are about to share the batches between ranks, of which samples would be lost."""
        ranks = rank_of(None, None)[1]
        if ranks == 1:
            raise AttributeError("batches are dropped never, and there is no choice")
        raise ValueError(
            f"each of the {ranks} ranks gets batches of its own already, which must not be shared between ranks again: "
            "in Lightning, set use_distributed_sampler=False; with accelerate or transformers' Trainer, take the "
            "DataLoader as it is, without accelerator.prepare"
        )

    def __len__(self) -> int:
        """This rank's batches in the epoch. Epochs differ by a batch or two."""
        return self._count(self.epoch)

    def __iter__(self) -> Iterator[list[int]]:
        epoch, resume = self._place.begin()
        if resume is None:
            self._place.reach(epoch, 0)
        return self._given(epoch, resume["position"] if resume else 0)

    def _given(self, epoch: int, begin: int) -> Iterator[list[int]]:
        # Not before the first batch is asked for: a DataLoader with workers makes two iterators, and takes the second.
        self._place.reach(epoch, begin)
        total = self._count(epoch)
        at_once = max(BLOCK // self.batch_size, 1)
        for first in range(begin, total, at_once):
            steps = range(first, min(first + at_once, total))
            for step, batch in zip(steps, self._batches(epoch, np.array(steps)), strict=True):
                self._place.reach(epoch, step + 1)
                yield batch

    def state_dict(self) -> dict[str, Any]:
        """Where the pass is. `position` counts the batches given out. A loader with workers fetches some ahead: there
        set it to the number of batches trained on, `sampler.state_dict() | {"position": steps}`."""
        return self._identity() | self._place.state()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Let the next pass go on from there; a ValueError if the state is of another sampler."""
        check_identity(state, self._identity(), "sampler")
        epoch, position = state["epoch"], state["position"]
        if position > (batches := self._count(epoch)):
            raise ValueError(f"position is {position}; epoch {epoch} has {batches} batches")
        self._place.load(state, ended=position == batches)

    def _identity(self) -> dict[str, int]:
        made = {"batch_size": self.batch_size, "k": self.k, "seed": self.seed, "lengths": self._checksum}
        return made | {"world_size": self._place.ranks[1]}

    def _count(self, epoch: int) -> int:
        """This rank's batches in an epoch."""
        return len(self._plan(epoch)[0]) // self._place.ranks[1]

    def _plan(self, epoch: int) -> tuple["_Windows", np.ndarray]:
        """The windows of an epoch, and by how much each length's stretch is rotated in it. The last one is kept."""
        ranks = self._place.ranks[1]
        if self._planned is None or self._planned[0] != (epoch, ranks):
            random = np.random.default_rng((self.seed, epoch))
            try:
                windows = self._windows(int(random.integers(self.k, endpoint=True)))
            except ValueError:  # so few samples that all ranks get some only within borders that make fewer batches
                windows = self._windows(self.k)
            rotations = random.integers(np.diff(self._starts))
            self._planned = (epoch, ranks), windows, rotations
        return self._planned[1:]

    def _windows(self, first: int) -> "_Windows":
        ranks = self._place.ranks[1]
        return _windows(self._values.tolist(), self._starts.tolist(), self.batch_size, self.k, first, ranks)

    def _batches(self, epoch: int, steps: np.ndarray) -> list[list[int]]:
        """The batches that this rank gets in these steps. O(their samples)."""
        windows, rotations = self._plan(epoch)
        rank, ranks = self._place.ranks
        # Steps are shuffled; in a step, the ranks get batches that are neighbours in order of length.
        groups = np.full(len(steps), len(windows) // ranks)
        group = permuted(uint(steps), uint(groups), self._keys(epoch, np.zeros(len(steps)))).astype(np.int64)
        window, begin, end = windows.bounds(group * ranks + rank)  # (batches,) each
        sizes = end - begin
        ends = np.cumsum(sizes)
        batch = np.repeat(np.arange(len(steps)), sizes)  # (samples,) the batch that each is in
        place = np.arange(ends[-1]) + (begin - ends + sizes)[batch]  # in its shuffled window
        where = permuted(uint(place), uint(windows.counts[window])[batch], self._keys(epoch, window + 1)[batch])
        where = where + windows.begins[window][batch]  # among the samples in order of length
        # Rotating each length's stretch by epoch changes which of its samples fall to which window.
        value = self._value[where]
        where = where + rotations[value]
        where -= np.where(where >= self._starts[1:][value], np.diff(self._starts)[value], 0)
        indices = self._order[where].tolist()
        return [indices[to - size : to] for size, to in zip(sizes.tolist(), ends.tolist(), strict=True)]

    def _keys(self, epoch: int, numbers: np.ndarray) -> np.ndarray:
        """The keys of an epoch's permutations of these numbers."""
        name = np.random.SeedSequence((self.seed, epoch)).generate_state(1)
        return mixed(mixed(uint(numbers) * GOLDEN + name) + name)


def _sorted(lengths: np.ndarray, seed: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The samples by length, equal ones in random order; the lengths that occur; where each one's samples start."""
    order = np.random.default_rng(seed).permutation(len(lengths)).astype(np.uint32)
    order = order[stable_argsort(lengths[order])]
    ascending = lengths[order]
    starts = np.flatnonzero(np.diff(ascending, prepend=-1))
    return order, ascending[starts], np.append(starts, len(lengths))


@dataclass(frozen=True)
class _Windows:
    """An epoch's windows over the samples in order of length, as arrays with an entry for each window."""

    begins: np.ndarray  # where it begins in the sorted samples
    counts: np.ndarray  # its samples
    batches: np.ndarray  # its batches
    even: np.ndarray  # whether its batches share its samples evenly, instead of the last being short
    batch_size: int

    @cached_property
    def first_batch(self) -> np.ndarray:
        """The number, in the epoch, of each window's first batch."""
        return np.cumsum(self.batches) - self.batches

    def __len__(self) -> int:
        """How many batches there are."""
        return int(self.batches.sum())

    def bounds(self, batch: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """The window of each batch, and from where to where in its shuffled samples the batch reaches."""
        window = np.searchsorted(self.first_batch, batch, side="right") - 1
        number, count, batches = batch - self.first_batch[window], self.counts[window], self.batches[window]
        even = self.even[window]
        begin = np.where(even, number * count // batches, number * self.batch_size)
        end = np.where(even, (number + 1) * count // batches, np.minimum(begin + self.batch_size, count))
        return window, begin, end


def _windows(values: Sequence[int], starts: Sequence[int], batch_size: int, k: int, first: int, ranks: int) -> _Windows:
    """Lay the windows of an epoch, a step each: the cost depends on how many lengths occur, not on how many samples.

    `values` are the lengths that occur, ascending; those of value i are the sorted samples `starts[i]` up to
    `starts[i + 1]`. The first window spans `first` instead of k, so that borders move by epoch. The number of batches
    is made a multiple of `ranks` by giving the largest windows a few more, smaller ones.
    """
    begins, counts = [], []
    total, begin, span = starts[-1], 0, first if values[-1] - values[0] > k else k
    while begin < total:
        shortest = values[bisect_right(starts, begin) - 1]
        end = starts[bisect_right(values, shortest + span)]
        count = end - begin
        if count > batch_size and end < total:
            count -= count % batch_size
        begins.append(begin)
        counts.append(count)
        begin, span = begin + count, k
    samples = np.array(counts, dtype=np.int64)
    batches = -(-samples // batch_size)
    even = _add_for_ranks(batches, samples, ranks)
    return _Windows(np.array(begins, dtype=np.int64), samples, batches, even, batch_size)


def _add_for_ranks(batches: np.ndarray, counts: np.ndarray, ranks: int) -> np.ndarray:
    """Add batches until they are a multiple of `ranks`, in place; returns which windows are cut evenly for it."""
    total = int(batches.sum())
    if total < ranks:
        raise ValueError(f"{ranks} ranks for {total} batches; use fewer ranks, more samples or smaller batches")
    missing = -total % ranks
    even = np.zeros(len(batches), dtype=bool)
    for window in np.argsort(batches - counts, kind="stable"):
        added = min(missing, int(counts[window] - batches[window]))
        batches[window] += added
        even[window] = added > 0
        missing -= added
        if not missing:
            return even
    raise ValueError(
        f"{total} batches of single samples can't be shared equally by {ranks} ranks; use another number of ranks"
    )
