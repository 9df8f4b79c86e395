"""What others use for the same, to compare with."""

from collections.abc import Callable, Iterator
from operator import itemgetter

import numpy as np


def bucket_iterator(lengths: np.ndarray, batch_size: int) -> Callable[[], Iterator[list[tuple[int, int]]]]:
    """torchtext's BucketIterator: a call begins an epoch of batches of (length, index).

    It shuffles all samples when an epoch begins, then sorts 100 batches' worth at a time. ImportError where torchtext
    isn't installed.
    """
    from torchtext.data import BucketIterator

    pairs = list(zip(lengths.tolist(), range(len(lengths)), strict=True))
    iterator = BucketIterator(pairs, batch_size, sort_key=itemgetter(0), sort_within_batch=True)

    def epoch() -> Iterator[list[tuple[int, int]]]:
        iterator.create_batches()
        return iterator.batches

    return epoch
