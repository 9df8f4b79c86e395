"""A packed sequence: several documents one after another, with where each begins."""

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from .packed_layout import PackedLayout

PADDING = -1  # the document that padding belongs to


class Packed(NamedTuple):
    """Documents of T tokens together, without a batch dimension: `packed.tokens[None]` is what a model takes.

    20 bytes a token, 4 a document, and T² for the mask. It is a tuple of tensors, so that a `DataLoader` pins it as it
    does any other. Workers send it by value: sharing the memory of four small tensors takes four times as long.

    Padding, if there is any, stands at the end, after `offsets[-1]`, as a document of its own.
    """

    tokens: Tensor  # (T,) int64
    offsets: Tensor  # (documents + 1,) int32: document d is tokens[offsets[d] : offsets[d + 1]]
    documents: Tensor  # (T,) int32: which document each token is of; −1 for padding
    positions: Tensor  # (T,) int64: where in its document each token stands; 0 in the padding
    mask: Tensor | None = None  # (T, T) bool, see `causal_mask`

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
        return Packed(*(None if part is None else part.to(device, non_blocking=non_blocking) for part in self))

    def pin_memory(self) -> "Packed":
        return Packed(*(None if part is None else part.pin_memory() for part in self))

    def layout(self) -> PackedLayout:
        """Where the documents lie, for attention; the padding is one more. For tensors on the host: it reads them."""
        return PackedLayout(self.offsets, len(self.tokens))

    def __reduce__(self) -> tuple:
        return _unpickled, (*map(_by_value, self[:-1]), self.mask)


def _by_value(part: Tensor) -> Tensor | np.ndarray:
    return part.numpy() if part.device.type == "cpu" else part


def _unpickled(*parts: Tensor | np.ndarray | None) -> Packed:
    return Packed(*(torch.from_numpy(part) if isinstance(part, np.ndarray) else part for part in parts))


def join(tokens: np.ndarray, lengths: np.ndarray, *, length: int | None = None, pad_id: int = 0) -> Packed:
    """The packed sequence of documents of these lengths, whose tokens stand one after another in `tokens`.

    With `length` it is padded to that many tokens. 15 µs and 10 ns a token.
    """
    total = len(tokens)
    offsets = np.concatenate([[0], np.cumsum(lengths)])
    length = total if length is None else length
    sizes = np.append(lengths, length - total)  # the last document is the padding
    firsts = np.append(offsets[:-1], total)
    places = np.arange(length) - np.repeat(firsts, sizes)
    places[total:] = 0  # a model's table of positions ends at its longest document
    ids = np.arange(len(sizes), dtype=np.int32)
    ids[-1] = PADDING
    whole = np.full(length, pad_id, dtype=np.int64)
    whole[:total] = tokens
    return Packed(
        tokens=torch.from_numpy(whole),
        offsets=torch.from_numpy(offsets.astype(np.int32)),
        documents=torch.from_numpy(np.repeat(ids, sizes)),
        positions=torch.from_numpy(places),
    )


def causal_mask(documents: Tensor) -> Tensor:
    """(T, T) True where a query, the row, may look at a key: one of its own document that does not come after it.

    As `scaled_dot_product_attention` takes it. Padding looks at padding, so that no row is empty and no NaN arises. It
    costs T² bytes: 4 MiB at T = 2,048, so make it where it is used, from `documents`, rather than send it there.
    """
    return (documents[:, None] == documents[None, :]).tril_()
