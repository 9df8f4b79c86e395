"""Batches of samples of nearly one length, in random order; a batch costs the same however many samples there are.

    lengths = [min(len(sample), 640) for sample in dataset]
    sampler = BalancedBatchSampler(lengths, batch_size=32, k=5)
    loader = DataLoader(dataset, batch_sampler=sampler, collate_fn=collate_fn)
    for epoch in range(epochs):
        sampler.set_epoch(epoch)
        for tokens in loader: ...

`__init__` sorts the samples by counting, in O(n), into one array in which each length owns a stretch, found by a hash
table. Nothing is shuffled after that: which samples an epoch's batch number i holds is *computed*, by permutations that
need no memory (see `permutation`). So a batch costs O(batch_size), a rank computes its own batches only, and a run is
resumed in mid-epoch by the number of the next batch.
"""

from collections.abc import Iterator
from typing import Any

import numpy as np
from torch.utils.data import Sampler

from .lengths import LONGEST, Lengths, at_least, checked_lengths, checked_rank
from .permutation import GOLDEN, mix, permuted
from .windows import Windows, plan

MOST = 2**32
BLOCK = 4096  # samples computed at once, or one batch: numpy's fixed costs are shared by the batches of a block


class BalancedBatchSampler(Sampler[list[int]]):
    """Random batches of indices whose lengths differ by at most `k`; every index exactly once an epoch.

    A batch has `batch_size` samples, fewer only where too few samples have lengths that near. With k at least the
    longest length less the shortest, batches are random over all samples.

    A pass over the sampler is an epoch, and the next pass the next one; `set_epoch` says which it is. The order
    depends on the seed and the epoch only. Of `world_size` ranks each gets equally many batches, none of them twice
    (a few batches are then smaller), and in each step all ranks get batches of neighbouring lengths, so that none
    waits for another's longer one.

    Memory: 6 bytes a sample. Before an epoch's first batch the windows are laid out: some microseconds for each length
    that occurs.
    """

    def __init__(
        self,
        lengths: Lengths,
        batch_size: int,
        k: int,
        seed: int = 0,
        *,
        max_length: int | None = None,
        rank: int = 0,
        world_size: int = 1,
    ) -> None:
        found = checked_lengths(lengths)
        if not 0 < len(found) < MOST:
            raise ValueError(f"there are {len(found)} samples; allowed: 1 to {MOST - 1}")
        if max_length is not None:
            found = np.minimum(found, at_least("max_length", max_length, 1))  # of samples that will be cut to it
        self.batch_size, self.k = at_least("batch_size", batch_size, 1), at_least("k", k, 0)
        self.seed = at_least("seed", seed, 0)
        self.rank, self.world_size = checked_rank(rank, world_size)
        self._order, self._values, self._starts = _sorted(found, self.seed)
        counts = np.diff(self._starts)
        small = np.uint16 if len(counts) < 2**16 else np.uint32
        self._bucket = np.repeat(np.arange(len(counts), dtype=small), counts)  # of each sample in order of length
        self._buckets = {length: number for number, length in enumerate(self._values.tolist())}
        self.epoch = self._position = self._resume_at = 0
        self._planned: tuple[int, Windows, np.ndarray] | None = None
        self._plan()  # too many ranks are an error here, not in mid-training

    def indices_of(self, length: int) -> np.ndarray:
        """The samples of this length, by one look into the hash table. A view; shuffled once."""
        number = self._buckets.get(length)
        if number is None:
            return self._order[:0]
        return self._order[self._starts[number] : self._starts[number + 1]]

    def set_epoch(self, epoch: int) -> None:
        """The epoch that the next pass is. Another one than the present begins with its first batch."""
        epoch = at_least("epoch", epoch, 0)
        if epoch != self.epoch:
            self.epoch, self._position, self._resume_at = epoch, 0, 0

    def __len__(self) -> int:
        """This rank's batches in the epoch. Epochs differ by a batch or two."""
        return len(self._plan()[0]) // self.world_size

    def __iter__(self) -> Iterator[list[int]]:
        begin, self._resume_at = self._resume_at, 0
        self._position = begin
        total, epoch = len(self), self.epoch
        at_once = max(BLOCK // self.batch_size, 1)
        for first in range(begin, total, at_once):
            for batch in self._batches(np.arange(first, min(first + at_once, total))):
                self._position += 1
                yield batch
        if self.epoch == epoch:  # otherwise set_epoch was called in between
            self.epoch, self._position = epoch + 1, 0

    def state_dict(self) -> dict[str, Any]:
        """Where the pass is. `position` counts the batches given out. A loader with workers fetches some ahead, and so
        ends the epoch before its last batches are trained on. There set both, `position` to the number of batches
        trained on: `sampler.state_dict() | {"epoch": epoch, "position": steps}`."""
        return self._identity() | {"epoch": self.epoch, "position": self._position}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """The next pass goes on from there."""
        differing = sorted(name for name, value in self._identity().items() if state.get(name) != value)
        if differing:
            raise ValueError(f"the state is of another sampler; it differs in {', '.join(differing)}")
        before, self.epoch = self.epoch, at_least("epoch", state.get("epoch"), 0)
        position, batches = at_least("position", state.get("position"), 0), len(self)
        if position > batches:
            last, self.epoch = self.epoch, before
            raise ValueError(f"position is {position}; epoch {last} has {batches} batches")
        self._position = self._resume_at = position

    def _identity(self) -> dict[str, int]:
        names = ("batch_size", "k", "seed", "world_size")
        return {name: getattr(self, name) for name in names} | {"samples": len(self._order)}

    def _plan(self) -> tuple[Windows, np.ndarray]:
        """The windows of the epoch, and how far each length's stretch is turned in it."""
        if self._planned is None or self._planned[0] != self.epoch:
            random = np.random.default_rng((self.seed, self.epoch))
            k = min(self.k, LONGEST)  # no two lengths differ by more
            first = int(random.integers(k, endpoint=True))
            windows = plan(self._values.tolist(), self._starts.tolist(), self.batch_size, k, first, self.world_size)
            turns = random.integers(np.diff(self._starts))
            self._planned = self.epoch, windows, turns
        return self._planned[1:]

    def _batches(self, steps: np.ndarray) -> list[list[int]]:
        """The batches that this rank gets in these steps. O(their samples)."""
        windows, turns = self._plan()
        groups = np.full(len(steps), len(windows) // self.world_size)
        group = permuted(_uint(steps), _uint(groups), self._keys(np.zeros(len(steps)))).astype(np.int64)
        window, begin, end = windows.bounds(group * self.world_size + self.rank)
        sizes = end - begin
        ends = np.cumsum(sizes)
        of = np.repeat(np.arange(len(steps)), sizes)  # the batch of each sample
        place = np.arange(ends[-1]) + (begin - ends + sizes)[of]
        where = permuted(_uint(place), _uint(windows.counts[window])[of], self._keys(window + 1)[of])
        where = where + windows.begins[window][of]  # among the samples in order of length
        bucket = self._bucket[where]
        turned = where + turns[bucket]
        turned -= np.where(turned >= self._starts[1:][bucket], np.diff(self._starts)[bucket], 0)
        indices = self._order[turned].tolist()
        return [indices[to - size : to] for size, to in zip(sizes.tolist(), ends.tolist(), strict=True)]

    def _keys(self, numbers: np.ndarray) -> np.ndarray:
        """The names of this epoch's permutations number so and so."""
        name = np.random.SeedSequence((self.seed, self.epoch)).generate_state(1)
        return mix(mix(_uint(numbers) * GOLDEN + name) + name)


def _sorted(lengths: np.ndarray, seed: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The samples by length, equal ones in random order; the lengths that occur; where each one's samples start.

    A radix sort: two bytes of the length a pass, so one pass up to 65,535. About 0.1 s for a million samples.
    """
    order = np.random.default_rng(seed).permutation(len(lengths)).astype(np.uint32)
    longest = int(lengths.max())
    for shift in range(0, max(longest.bit_length(), 1), 16):
        digit = ((lengths >> shift) & 0xFFFF).astype(np.uint16)[order]
        order = order[np.argsort(digit, kind="stable")]
    inorder = lengths[order]
    starts = np.flatnonzero(np.diff(inorder, prepend=-1))
    return order, inorder[starts], np.append(starts, len(lengths))


def _uint(values: np.ndarray) -> np.ndarray:
    return values.astype(np.uint32)
