"""Which samples may share a batch: an epoch's windows over the samples in order of length.

Sorted by length, the samples that may stand together are runs. A window is such a run whose lengths differ by at most
k; its samples are shuffled and cut into batches. A window keeps as many samples as fill whole batches and leaves its
longest few to the next one, so that a batch is short only where too few samples have lengths that near.
"""

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Windows:
    """Windows side by side: where each begins in the sorted samples, its samples, its batches, all before it."""

    begins: np.ndarray
    counts: np.ndarray
    batches: np.ndarray
    first_batch: np.ndarray  # of each window, numbered through the epoch
    even: np.ndarray  # whether a window's batches share its samples evenly, instead of the last being short
    batch_size: int

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


def plan(values: Sequence[int], starts: Sequence[int], batch_size: int, k: int, first: int, ranks: int = 1) -> Windows:
    """The windows of an epoch. `values` are the lengths that occur, ascending; those of value i are the sorted samples
    `starts[i]` up to `starts[i + 1]`. The first window spans `first` instead of k, so that borders move by epoch.

    One step a window: its cost depends on how many lengths occur, not on how many samples there are. The batches are
    made a multiple of `ranks` by giving the largest windows a few more, smaller ones.
    """
    begins, counts = [], []
    total, at, spread = starts[-1], 0, first if values[-1] - values[0] > k else k
    while at < total:
        shortest = values[bisect_right(starts, at) - 1]
        end = starts[bisect_right(values, shortest + spread)]
        count = end - at
        if count > batch_size and end < total:
            count -= count % batch_size
        begins.append(at)
        counts.append(count)
        at, spread = at + count, k
    held = np.array(counts, dtype=np.int64)
    batches = -(-held // batch_size)
    even = _share_out(batches, held, ranks)
    first_batch = np.cumsum(batches) - batches
    return Windows(np.array(begins, dtype=np.int64), held, batches, first_batch, even, batch_size)


def _share_out(batches: np.ndarray, counts: np.ndarray, ranks: int) -> np.ndarray:
    """Add batches until they are a multiple of `ranks`, in place; says which windows are cut evenly for it."""
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
