"""What a gradient scaler does to gradients, in plain tensor operations: one after the other, easy to follow.

`fast` has the same functions, and does them for all gradients at once.
"""

import torch
from torch import Tensor


def found_inf(grads: list[Tensor]) -> Tensor:
    """1.0 if any gradient holds an inf or a NaN, else 0.0; on the gradients' device."""
    found = torch.zeros((), device=grads[0].device)
    for grad in grads:
        found = torch.maximum(found, 1.0 - torch.isfinite(grad).all().float())
    return found


def not_finite(number: Tensor) -> Tensor:
    """1.0 if a number is inf or NaN, else 0.0, in fp32."""
    return 1.0 - torch.isfinite(number).float()


def multiply_(grads: list[Tensor], factor: Tensor) -> None:
    """Multiply each gradient in place by a 0-dimensional factor."""
    for grad in grads:
        grad.mul_(factor)


def norm(grads: list[Tensor], norm_type: float) -> Tensor:
    """The norm of all gradients as one vector."""
    return torch.linalg.vector_norm(torch.stack([torch.linalg.vector_norm(g, norm_type) for g in grads]), norm_type)


def update_(
    scale: Tensor,
    good_steps: Tensor,
    found_inf: Tensor,
    growth: float,
    backoff: float,
    interval: int,
    bounds: tuple[float, float],
) -> None:
    """Shrink the scale after a bad step, grow it after `interval` good ones in a row; all in place, nothing is read."""
    bad = found_inf > 0
    in_a_row = torch.where(bad, 0, good_steps + 1)
    grow = in_a_row == interval
    larger, smaller = ((scale.double() * factor).float() for factor in (growth, backoff))
    larger = torch.where(torch.isfinite(larger), larger, scale)
    scale.copy_(torch.where(bad, smaller, torch.where(grow, larger, scale)).clamp(*bounds))
    good_steps.copy_(torch.where(grow, 0, in_a_row))
