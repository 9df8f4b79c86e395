"""Documents one after another in one sequence: `Packed` holds their tokens, `PackedLayout` what attention needs."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple, NoReturn

import numpy as np
import torch
from torch import Tensor
from torch.utils.data._utils.collate import default_collate_fn_map

from ..lab.arguments import check_at_least

PADDING = -1  # the document that padding belongs to


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

    def __init__(self, offsets: Sequence[int] | np.ndarray | Tensor, length: int | None = None) -> None:
        object.__setattr__(self, "offsets", _checked_offsets(offsets, length))

    def __len__(self) -> int:
        """T, all documents together."""
        return int(self.offsets[-1])

    @cached_property
    def lengths(self) -> np.ndarray:
        """(documents,) int32."""
        return np.diff(self.offsets)

    @cached_property
    def documents(self) -> np.ndarray:
        """(T,) int32: the number of the document at each position."""
        return np.repeat(np.arange(len(self.lengths), dtype=np.int32), self.lengths)

    @cached_property
    def positions(self) -> np.ndarray:
        """(T,) int64: the place of each token in its own document, as a model of positions reads it."""
        return np.arange(len(self)) - np.repeat(self.offsets[:-1], self.lengths)


def _checked_offsets(offsets: Sequence[int] | np.ndarray | Tensor, length: int | None) -> np.ndarray:
    """The offsets of a layout as int32, the padding as a last document; a ValueError names what is wrong."""
    array = np.asarray(offsets)
    whole = array.ndim == 1 and len(array) >= 2 and array.dtype.kind in "iu"
    if not whole or array[0] != 0 or (array[1:] < array[:-1]).any():
        raise ValueError(f"offsets are {array}; they must be whole numbers that begin with 0 and never descend")
    length = int(array[-1]) if length is None else length
    check_at_least(max(int(array[-1]), 1), length=length)
    array = (np.append(array, length) if array[-1] < length else array).astype(np.int32)  # a copy, whatever it was
    array.setflags(write=False)
    return array


class Packed(NamedTuple):
    """Documents of T tokens together, without a batch dimension: `packed.tokens[None]` is what a model takes.

    20 bytes a token and 4 a document. It is a tuple of tensors, so that a `DataLoader` pins it as it does any other.
    Workers send it by value: sharing the memory of four small tensors takes four times as long.

    Padding, if there is any, stands at the end, after `offsets[-1]`, as a document of its own.
    """

    tokens: Tensor  # (T,) int64
    offsets: Tensor  # (documents + 1,) int32: document d is tokens[offsets[d] : offsets[d + 1]]
    documents: Tensor  # (T,) int32: which document each token is of; −1 for padding
    positions: Tensor  # (T,) int64: where in its document each token stands; 0 in the padding

    def targets(self, pad_id: int = 0) -> Tensor:
        """(T,) What language modelling predicts at each token: the next one of its document.

        `pad_id` where there is none, after a document's last token and in the padding, as `LMCrossEntropyLoss` takes
        it. `torch.nn.functional.cross_entropy` ignores -100.
        """
        following = self.tokens.new_full(self.tokens.shape, pad_id)
        inside = (self.documents[1:] == self.documents[:-1]) & (self.documents[1:] != PADDING)
        following[:-1] = torch.where(inside, self.tokens[1:], pad_id)
        return following

    def to(self, device: torch.device | str, non_blocking: bool = False) -> "Packed":
        """The same on another device."""
        return Packed(*(part.to(device, non_blocking=non_blocking) for part in self))

    def layout(self) -> PackedLayout:
        """Where the documents lie, for attention; the padding is one more. For tensors on the host: it reads them."""
        return PackedLayout(self.offsets, len(self.tokens))

    def __reduce__(self) -> tuple:
        return _unpickled, tuple(part.numpy() if part.is_cpu else part for part in self)


def _not_stacked(batch: list[Packed], **_: Any) -> NoReturn:
    raise ValueError("what the dataset yields is a batch already: DataLoader(dataset, batch_size=None)")


default_collate_fn_map[Packed] = _not_stacked  # else torch stacks the parts, or fails at their shapes


def _unpickled(*parts: Tensor | np.ndarray) -> Packed:
    return Packed(*(torch.from_numpy(part) if isinstance(part, np.ndarray) else part for part in parts))


def join(tokens: np.ndarray, lengths: np.ndarray, *, length: int | None = None, pad_id: int = 0) -> Packed:
    """The packed sequence of documents of these lengths, whose tokens stand one after another in `tokens`.

    With `length` it is padded to that many tokens. 15 µs and 10 ns a token.
    """
    total = len(tokens)
    offsets = np.concatenate([[0], np.cumsum(lengths)])
    length = total if length is None else length
    sizes = np.append(lengths, length - total)  # the last document is the padding
    positions = np.arange(length) - np.repeat(offsets, sizes)
    positions[total:] = 0  # a model's table of positions ends at its longest document
    documents = np.arange(len(sizes), dtype=np.int32)
    documents[-1] = PADDING
    padded = np.full(length, pad_id, dtype=np.int64)
    padded[:total] = tokens
    return Packed(
        tokens=torch.from_numpy(padded),
        offsets=torch.from_numpy(offsets.astype(np.int32)),
        documents=torch.from_numpy(np.repeat(documents, sizes)),
        positions=torch.from_numpy(positions),
    )


def causal_mask(documents: Tensor) -> Tensor:
    """(T, T) True where a query, the row, may look at a key: one of its own document that does not come after it.

    As `scaled_dot_product_attention` takes it. Padding looks at padding, so that no row is empty and no NaN arises. It
    costs T² bytes: 4 MiB at T = 2,048, so make it where it is used, from `documents`, rather than send it there.
    """
    return (documents[:, None] == documents[None, :]).tril_()
