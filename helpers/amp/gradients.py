"""What fp16 loses of gradients: how many are exactly zero, and how they are spread over exponents."""

import torch
from torch import Tensor

LOWEST, HIGHEST = -60, 20  # exponents that are told apart; fp16 ends at -24, with subnormal numbers


def count_exponents(values: Tensor) -> Tensor:
    """Counts of values by exponent: at 0 the exact zeros, then LOWEST to HIGHEST. Nothing is read on the host."""
    magnitude = values.detach().float().abs()
    exponent = torch.frexp(magnitude).exponent - 1
    bins = torch.where(magnitude == 0, 0, exponent.clamp(LOWEST, HIGHEST) - LOWEST + 1)
    return torch.bincount(bins.flatten().long(), minlength=HIGHEST - LOWEST + 2)


def zero_share(grads: list[Tensor]) -> Tensor:
    """The share of all their values that is exactly zero."""
    return sum((g == 0).sum() for g in grads) / sum(g.numel() for g in grads)
