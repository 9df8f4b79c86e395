"""Random permutations that are computed, not stored.

All arithmetic is in 32 bits and wraps, so that numpy works on 16 numbers at once.
"""

import numpy as np

ROUNDS = 6
SMALL = 32  # up to so many are ranked: that costs O(SMALL) an index
GOLDEN, FIRST, SECOND = (np.uint32(x) for x in (0x9E3779B9, 0x7FEB352D, 0x846CA68B))  # odd numbers, bits well spread
FIFTEEN, SIXTEEN = np.uint32(15), np.uint32(16)


def permuted(index: np.ndarray, size: np.ndarray, key: np.ndarray) -> np.ndarray:
    """Where each index goes under the permutation of `range(size)` that `key` names, in O(1) and no memory.

    All three are uint32 of one shape, so indices of different permutations can be mixed. About 40 ns an index.

    A Feistel network over a grid of at least `size` cells moves the column by a hash of the row and the row by a hash
    of the column, in turn; every such round can be undone, so the whole is a permutation. The few indices that land
    outside go through it again (cycle walking). Of at most 32, where a grid is too narrow to mix well, each index goes
    to the rank of its hash.
    """
    small = size <= SMALL
    if not small.any():
        return _walked(index, size, key)
    moved = np.empty_like(index)
    for chosen, move in ((small, _ranked), (~small, _walked)):
        if chosen.any():
            moved[chosen] = move(index[chosen], size[chosen], key[chosen])
    return moved


def _ranked(index: np.ndarray, size: np.ndarray, key: np.ndarray) -> np.ndarray:
    every = np.arange(SMALL, dtype=np.uint32)
    hashes = mixed(key[:, None] + (every + np.uint32(1)) * GOLDEN).astype(np.uint64)  # (m, SMALL)
    hashes = hashes * np.uint64(SMALL) + every  # no two alike
    hashes[every >= size[:, None]] = np.uint64(2**64 - 1)
    own = np.take_along_axis(hashes, index[:, None].astype(np.intp), axis=1)
    return (hashes < own).sum(axis=1).astype(np.uint32)


def _walked(index: np.ndarray, size: np.ndarray, key: np.ndarray) -> np.ndarray:
    rows = np.ceil(np.sqrt(size)).astype(np.uint32)
    columns = (size + rows - np.uint32(1)) // rows
    moved = _rounds(index, rows, columns, key)
    outside = np.flatnonzero(moved >= size)
    while len(outside):
        moved[outside] = _rounds(moved[outside], rows[outside], columns[outside], key[outside])
        outside = outside[moved[outside] >= size[outside]]
    return moved


def _rounds(index: np.ndarray, rows: np.ndarray, columns: np.ndarray, key: np.ndarray) -> np.ndarray:
    row = index // columns
    column = index - row * columns
    for number in range(ROUNDS):
        round_key = key + np.uint32((number + 1) * int(GOLDEN) % 2**32)
        if number % 2:
            row = _shifted(row, column, rows, round_key)
        else:
            column = _shifted(column, row, columns, round_key)
    return row * columns + column


def _shifted(place: np.ndarray, other: np.ndarray, size: np.ndarray, key: np.ndarray) -> np.ndarray:
    """(place + a random number below size that `other` and `key` name) mod size.

    In place where it can be: this is where the time goes.
    """
    bits = other ^ key
    bits *= FIRST
    bits ^= bits >> FIFTEEN
    bits *= SECOND
    bits >>= SIXTEEN  # 16 random bits
    bits *= size
    bits >>= SIXTEEN  # below size
    bits += place
    return np.minimum(bits, bits - size)  # what would be negative wraps, and so is the larger of the two


def mixed(bits: np.ndarray) -> np.ndarray:
    """A hash of 32-bit numbers: every bit of the input moves about half of the output's."""
    bits = (bits ^ (bits >> SIXTEEN)) * FIRST
    bits = (bits ^ (bits >> SIXTEEN)) * SECOND
    return bits ^ (bits >> SIXTEEN)


def uint(values: np.ndarray) -> np.ndarray:
    return values.astype(np.uint32)
