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


def multiply_(grads: list[Tensor], factor: Tensor) -> None:
    """Multiply each gradient in place by a 0-dimensional factor."""
    for grad in grads:
        grad.mul_(factor)


def norm(grads: list[Tensor], norm_type: float) -> Tensor:
    """The norm of all gradients as one vector."""
    return torch.linalg.vector_norm(torch.stack([torch.linalg.vector_norm(g, norm_type) for g in grads]), norm_type)
