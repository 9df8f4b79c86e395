"""Tensors in 8 bits: groups of 128 neighbours share one fp32 scale, their largest magnitude / 127.

1 + 4/128 bytes an element. The rounding error is at most half a step of its group; for normally distributed values its
root mean square is about 0.65 % of their standard deviation. One outlier costs precision in its own group only.
"""

import torch
from torch import Tensor

GROUP = 128


def groups(elements: int) -> int:
    """How many scales so many elements need; the last group may be short."""
    return -(-elements // GROUP)


def pack(values: Tensor) -> tuple[Tensor, Tensor]:
    """int8 values of the same shape, and a scale a group (of the flattened tensor)."""
    rows = torch.nn.functional.pad(values.reshape(-1).float(), (0, groups(values.numel()) * GROUP - values.numel()))
    rows = rows.view(-1, GROUP)
    largest = rows.abs().amax(dim=1, keepdim=True)
    steps = torch.where(largest > 0, 127.0 / largest, 0.0)
    packed = torch.floor(rows * steps + 0.5).to(torch.int8)
    return packed.view(-1)[: values.numel()].view(values.shape).clone(), (largest / 127.0).view(-1)


def unpack(packed: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """What `pack` was given, rounded. A scale that isn't finite makes its whole group not finite."""
    each = scale.repeat_interleave(GROUP)[: packed.numel()]
    return (packed.reshape(-1).float() * each).to(dtype).view(packed.shape)
