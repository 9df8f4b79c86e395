"""FlexAttention's block mask of packed documents, from the documents' ends instead of from T² questions.

`create_block_mask` asks of each of the T² pairs of a query and a key whether it is seen, in memory for T² answers,
though only one answer for each (128, 128) block is kept. Documents lie one after another, so a block's first and last
position say it all. For a block of keys that lies before a block of queries:

    it is seen at all     if the last key and the first query are of one document
    it is seen as a whole if the first key and the last query are of one document (then all between them are)

and the blocks on the diagonal are seen in part. That costs O(T + (T / 128)²) in numpy, the tables that FlexAttention
reads among it, and one copy to the device. The result is equal to `create_block_mask`'s, number by number.
"""

import numpy as np
import torch
from torch.nn.attention.flex_attention import BlockMask

from .packed_layout import to_device

BLOCK = 128  # FlexAttention's default; positions


def block_mask(documents: np.ndarray, device: torch.device | str, size: int = BLOCK) -> BlockMask:
    """The mask of one batch: causal, within documents, where `documents` (T,) int32 are their ascending numbers."""
    partial, full = blocks(documents, size)
    tables = [table for seen in (partial, full, partial.T, full.T) for table in _ordered(seen)]
    of_position, *tables = to_device([documents, *tables], device)
    counts, indices = ([table[None, None] for table in tables[start::2]] for start in (0, 1))  # (1, 1, N), (1, 1, N, N)

    def seen(batch: torch.Tensor, head: torch.Tensor, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
        return (of_position[query] == of_position[key]) & (query >= key)

    return BlockMask(
        seq_lengths=(len(documents), len(documents)),
        kv_num_blocks=counts[0],
        kv_indices=indices[0],
        full_kv_num_blocks=counts[1],
        full_kv_indices=indices[1],
        q_num_blocks=counts[2],
        q_indices=indices[2],
        full_q_num_blocks=counts[3],
        full_q_indices=indices[3],
        BLOCK_SIZE=(size, size),
        mask_mod=seen,
    )


def blocks(documents: np.ndarray, size: int = BLOCK) -> tuple[np.ndarray, np.ndarray]:
    """Which blocks are seen in part and which as a whole: two (N, N) of bool, queries × keys, N = ceil(T / size)."""
    number = -(-len(documents) // size)
    first, last = documents[::size], documents[size - 1 :: size]
    whole = len(last) == number  # otherwise the last block is cut off by the end, and not seen as a whole
    last = last if whole else np.append(last, documents[-1])
    before = np.tri(number, k=-1, dtype=bool)
    full = before & (first[None, :] == last[:, None])
    if not whole:
        full[-1] = False
    some = before & (last[None, :] == first[:, None])
    return (some & ~full) | np.eye(number, dtype=bool), full


def spelled_out(documents: np.ndarray, size: int = BLOCK) -> torch.Tensor:
    """What FlexAttention takes from the blocks, for each of the T² pairs: (T, T) of bool, on the CPU."""
    length = len(documents)
    seen = (documents[:, None] == documents[None, :]) & np.tri(length, dtype=bool)
    partial, full = (
        side.repeat(size, axis=0).repeat(size, axis=1)[:length, :length] for side in blocks(documents, size)
    )
    return torch.from_numpy(full | (partial & seen))


def _ordered(seen: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """For each row how many blocks are seen, (N,), and their numbers, those seen first, (N, N)."""
    return seen.sum(axis=-1, dtype=np.int32), np.argsort(~seen, axis=-1, kind="stable").astype(np.int32)
