"""What a gradient scaler does to gradients, for all of them at once: a few launches whatever their number.

`found_inf` and `norm` read each gradient once and write nothing (4 bytes a parameter in fp32); `multiply_` reads and
writes (8 bytes). The rest is single numbers, where a launch is what costs, so there are few. Nothing is read on the
host.
"""

import torch
from torch import Tensor


def found_inf(grads: list[Tensor]) -> Tensor:
    """1.0 if any gradient holds an inf or a NaN, else 0.0: the largest magnitude is finite only if all are."""
    return not_finite(torch.stack(torch._foreach_norm(grads, float("inf"))).amax())


def not_finite(number: Tensor) -> Tensor:
    """1.0 if a number is inf or NaN, else 0.0, in fp32: both of them times 0 are NaN."""
    return torch.nan_to_num((number * 0.0).float(), nan=1.0)


def multiply_(grads: list[Tensor], factor: Tensor) -> None:
    """Multiply each gradient in place by a 0-dimensional factor."""
    torch._foreach_mul_(grads, factor)


def norm(grads: list[Tensor], norm_type: float) -> Tensor:
    """The norm of all gradients as one vector."""
    return torch.linalg.vector_norm(torch.stack(torch._foreach_norm(grads, norm_type)), norm_type)


def update_(
    scale: Tensor,
    good_steps: Tensor,
    found_inf: Tensor,
    growth: float,
    backoff: float,
    interval: int,
    bounds: tuple[float, float],
) -> None:
    """Grow or shrink the scale in place, as `readable.update_` spells out, in torch's own kernel and one for bounds."""
    torch._amp_update_scale_(scale, good_steps, found_inf, growth, backoff, interval)
    scale.clamp_(*bounds)
