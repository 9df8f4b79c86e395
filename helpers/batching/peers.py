"""What others use for the same, to compare with."""

from collections.abc import Iterator
from operator import itemgetter

import numpy as np


def bucket_iterator(lengths: np.ndarray, batch_size: int) -> Iterator[list[tuple[int, int]]]:
    """An epoch of torchtext's BucketIterator: batches of (length, index). ImportError where torchtext isn't installed.

    It shuffles all samples when an epoch begins, then sorts 100 batches' worth at a time.
    """
    from torchtext.data import BucketIterator

    pairs = list(zip(lengths.tolist(), range(len(lengths)), strict=True))
    batches = BucketIterator(pairs, batch_size, sort_key=itemgetter(0), sort_within_batch=True)
    batches.create_batches()
    return batches.batches
