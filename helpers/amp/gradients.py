"""An optimizer's gradients, dense or sparse: whether a norm of them is finite, and products with a factor."""

import torch
from torch import Tensor
from torch.optim import Optimizer


def gradients(optimizer: Optimizer) -> list[Tensor]:
    """The optimizer's gradients; for sparse ones their coalesced values. Empty ones are left out."""
    with_gradient = [parameter for parameter in parameters(optimizer) if parameter.grad is not None]
    if not with_gradient:
        raise RuntimeError("the optimizer has no gradients: call scaler.scale(loss).backward() first")
    grads = []
    for parameter in with_gradient:
        if parameter.grad.dtype == torch.float16:
            raise ValueError(
                "a gradient is in fp16: keep the parameters in fp32 and use Autocast; a model in pure fp16 has no "
                "precision left to unscale into"
            )
        if parameter.grad.is_sparse:
            parameter.grad = parameter.grad.coalesce()
        grads.append(parameter.grad._values() if parameter.grad.is_sparse else parameter.grad)
    return [grad for grad in grads if grad.numel() > 0]


def parameters(optimizer: Optimizer) -> list[Tensor]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


@torch.no_grad()
def multiply_(grads: list[Tensor], factor: Tensor) -> None:
    """Multiply gradients in place by a 0-dimensional factor, in a few launches for any number of them."""
    for device in {grad.device for grad in grads}:
        torch._foreach_mul_([grad for grad in grads if grad.device == device], factor.to(device, non_blocking=True))


def not_finite(number: Tensor) -> Tensor:
    """1.0 if a number is inf or NaN, else 0.0, in fp32: both times 0 are NaN."""
    return torch.nan_to_num((number * 0.0).float(), nan=1.0)
