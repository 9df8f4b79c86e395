"""Lengths as every piece here takes them: whole numbers from 0 on, in one dimension."""

from collections.abc import Sequence

import numpy as np
from torch import Tensor

Lengths = Sequence[int] | np.ndarray | Tensor

LONGEST = 2**40  # so that sums of millions of lengths fit into 64 bits


def checked_lengths(lengths: Lengths) -> np.ndarray:
    """The lengths as int64 (n,); a ValueError names the first that is none. Two passes, about 1 ms for a million."""
    if isinstance(lengths, Tensor):
        lengths = (lengths.double() if lengths.is_floating_point() else lengths).numpy(force=True)
    try:
        found = np.asarray(lengths)
    except ValueError:  # numpy's, of lists that differ in length: the samples in place of their lengths
        raise ValueError("lengths are sequences; they must be whole numbers, 0 or more") from None
    if found.ndim != 1:
        raise ValueError(f"lengths have shape {found.shape}; they must be one-dimensional")
    if not len(found):
        return found.astype(np.int64)
    if found.dtype.kind not in "iu":
        found = np.array(lengths, dtype=object)  # whole numbers all the same, if numpy has no type that holds them
        for length in found.tolist():
            if isinstance(length, bool) or not hasattr(length, "__index__"):
                raise ValueError(f"a length is {length!r}; lengths must be whole numbers, 0 or more")
    if found.min() < 0:
        place = int(np.argmax(found < 0))
        raise ValueError(f"length {place} is {found[place]}; lengths must be whole numbers, 0 or more")
    if found.max() > LONGEST:
        place = int(np.argmax(found > LONGEST))
        raise ValueError(f"length {place} is {found[place]}; it must be at most {LONGEST}")
    return found.astype(np.int64)


def lengths_of(samples: Sequence) -> np.ndarray:
    """The lengths of samples (n,): a corpus knows its own; of anything else each sample is looked at once."""
    known = getattr(samples, "lengths", None)
    if known is None:
        return checked_lengths([len(samples[index]) for index in range(len(samples))])
    if len(known) != len(samples):
        raise ValueError(f"there are {len(known)} lengths; there must be one for each of the {len(samples)} samples")
    return checked_lengths(known)


def checked_rank(rank: int, world_size: int) -> tuple[int, int]:
    """Both, if there is such a rank."""
    rank, world_size = at_least("rank", rank, 0), at_least("world_size", world_size, 1)
    if rank >= world_size:
        raise ValueError(f"rank is {rank}; of {world_size} ranks the last is {world_size - 1}")
    return rank, world_size


def at_least(name: str, value: int, least: int) -> int:
    """The value as an int, if it is a whole number from `least` on."""
    if isinstance(value, bool) or not hasattr(value, "__index__") or value.__index__() < least:
        raise ValueError(f"{name} is {value!r}; it must be a whole number, {least} or more")
    return value.__index__()
