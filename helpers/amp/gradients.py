"""What is counted of gradients: how many are exactly zero, and their exponents. Nothing is read on the host."""

import torch
from torch import Tensor

LOWEST, HIGHEST = -60, 20  # exponents that are told apart; fp16 ends at -24, with subnormal numbers


def exponents(values: Tensor) -> Tensor:
    """Counts of values by exponent: place 0 for exact zeros, then LOWEST to HIGHEST."""
    magnitude = values.detach().float().abs()
    exponent = torch.frexp(magnitude).exponent - 1
    places = torch.where(magnitude == 0, 0, exponent.clamp(LOWEST, HIGHEST) - LOWEST + 1)
    return torch.bincount(places.flatten().long(), minlength=HIGHEST - LOWEST + 2)


def zero_share(grads: list[Tensor]) -> Tensor:
    """The share of all their values that is exactly zero."""
    return sum((g == 0).sum() for g in grads) / sum(g.numel() for g in grads)
