"""Where the documents of a packed sequence lie: all that attention has to know about a batch, known on the host."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

Offsets = Sequence[int] | np.ndarray | Tensor
ALIGNED = 4  # int32s in 16 bytes: what compiled kernels like their inputs to start at a multiple of


@dataclass(frozen=True, eq=False)
class PackedLayout:
    """Documents one after another in one sequence of T positions; document i is `offsets[i]` to `offsets[i + 1]`.

        layout = PackedLayout([0, 3, 7, 8])      # three documents, of 3, 4 and 1 tokens; T = 8
        layout = PackedLayout([0, 3, 7], 10)     # two documents, and 3 positions of padding; T = 10

    `offsets` are whole numbers on the host that start at 0, never descend, and end at T, or, where `length` is given,
    at the padding: to attention that is one document more. Everything here is numpy on the host, so that asking never
    waits for a GPU, and is worked out when it is first asked for, in O(T).
    """

    offsets: np.ndarray  # (documents + 1,) int32

    def __init__(self, offsets: Offsets, length: int | None = None) -> None:
        object.__setattr__(self, "offsets", _checked(offsets, length))

    def __len__(self) -> int:
        """T, all documents together."""
        return int(self.offsets[-1])

    @cached_property
    def lengths(self) -> np.ndarray:
        """(documents,) int32."""
        return np.diff(self.offsets)

    @cached_property
    def longest(self) -> int:
        return int(self.lengths.max())

    @cached_property
    def documents(self) -> np.ndarray:
        """(T,) int32: the number of the document at each position."""
        return np.repeat(np.arange(len(self.lengths), dtype=np.int32), self.lengths)

    @cached_property
    def positions(self) -> np.ndarray:
        """(T,) int64: the place of each token in its own document, as a model of positions reads it."""
        return np.arange(len(self)) - np.repeat(self.offsets[:-1], self.lengths)


def to_device(arrays: Sequence[np.ndarray], device: torch.device | str) -> list[Tensor]:
    """Arrays of int32 as tensors of the device, in one copy. On CUDA it is queued from pinned memory: nothing waits."""
    starts = np.cumsum([0, *(-(-array.size // ALIGNED) * ALIGNED for array in arrays)])
    on_cuda = torch.device(device).type == "cuda"
    buffer = torch.zeros(int(starts[-1]), dtype=torch.int32, device="cpu", pin_memory=on_cuda)
    for array, start in zip(arrays, starts, strict=False):
        buffer.numpy()[start : start + array.size] = array.ravel()
    there = buffer.to(device, non_blocking=True)
    return [
        there[start : start + array.size].view(array.shape)
        for array, start in zip(arrays, starts.tolist(), strict=False)
    ]


def _checked(offsets: Offsets, length: int | None) -> np.ndarray:
    if isinstance(offsets, Tensor) and not offsets.is_cpu:
        raise ValueError(f"offsets lie on {offsets.device}, where reading them waits for it; pass them from the host")
    found = np.asarray(offsets)
    if found.ndim != 1 or len(found) < 2 or found.dtype.kind not in "iu":
        raise ValueError(
            f"offsets are {found.dtype} of shape {found.shape}; they must be whole numbers, the start of each document "
            "and the end of the last"
        )
    if found[0] != 0:
        raise ValueError(f"offsets start at {found[0]}; they must start at 0")
    falls = found[1:] < found[:-1]
    if falls.any():
        at = int(falls.argmax())
        raise ValueError(f"offsets fall from {found[at]} to {found[at + 1]} at place {at + 1}; they must not descend")
    length = int(found[-1]) if length is None else length
    if not isinstance(length, (int, np.integer)):
        raise ValueError(f"length is {length!r}; it must be a whole number of positions")
    if found[-1] > length:
        raise ValueError(f"offsets end at {found[-1]}, after the end of the sequence, {length}")
    if not 1 <= length < 2**31:
        raise ValueError(f"the sequence has {length} positions; allowed: 1 to {2**31 - 1}")
    if found[-1] < length:
        found = np.append(found, length)
    found = found.astype(np.int32)  # a copy: what the caller does to its own later changes nothing here
    found.setflags(write=False)
    return found
