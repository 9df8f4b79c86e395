"""What a gradient scaler does to gradients, for all of them at once: a few launches whatever their number.

`found_inf` and `norm` read each gradient once and write nothing (4 bytes a parameter in fp32); `multiply_` reads and
writes (8 bytes). Nothing is read on the host.
"""

import torch
from torch import Tensor


def found_inf(grads: list[Tensor]) -> Tensor:
    """1.0 if any gradient holds an inf or a NaN, else 0.0: the largest magnitude is finite only if all are."""
    largest = torch.stack(torch._foreach_norm(grads, float("inf")))
    return 1.0 - torch.isfinite(largest).all().float()


def multiply_(grads: list[Tensor], factor: Tensor) -> None:
    """Multiply each gradient in place by a 0-dimensional factor."""
    torch._foreach_mul_(grads, factor)


def norm(grads: list[Tensor], norm_type: float) -> Tensor:
    """The norm of all gradients as one vector."""
    return torch.linalg.vector_norm(torch.stack(torch._foreach_norm(grads, norm_type)), norm_type)
