"""An optimizer's gradients: their norm, whether they are finite, and products with a factor.

They may be sparse, or sharded over ranks (`DTensor`, as by FSDP2): a norm is then over all ranks, which communicate
once, and a product is local.
"""

import math
from collections import defaultdict
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils import get_total_norm
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


def total_norm(grads: list[Tensor], norm_type: float) -> Tensor:
    """The norm of all gradients, in one read-only pass; of sharded ones over all ranks of their mesh."""
    by_mesh = defaultdict(list)
    for grad in grads:
        by_mesh[getattr(grad, "device_mesh", None)].append(grad)
    norms = [
        get_total_norm(group, norm_type) if mesh is None else _sharded_norm(group, norm_type)
        for mesh, group in by_mesh.items()
    ]
    return norms[0] if len(norms) == 1 else get_total_norm(norms, norm_type)


def _sharded_norm(grads: list[Any], norm_type: float) -> Tensor:
    """The norm of DTensors of one mesh, the same on every rank; inf where the largest magnitude is NaN."""
    if norm_type != math.inf:
        return get_total_norm(grads, norm_type).full_tensor()
    from torch.distributed.tensor import DTensor, Partial  # not at the top: few need it, and it takes a while

    first, mesh = grads[0], grads[0].device_mesh
    # DTensor's own inf norm fails on a rank without rows, and a maximum over ranks may lose a NaN, but not an inf.
    shards = [shard for grad in grads if (shard := grad.to_local()).numel() > 0]
    largest = get_total_norm(shards, norm_type).to(first.device, first.dtype).nan_to_num(nan=math.inf, posinf=math.inf)
    return DTensor.from_local(largest, mesh, [Partial("max")] * mesh.ndim).full_tensor()


@torch.no_grad()
def multiply_(grads: list[Tensor], factor: Tensor) -> None:
    """Multiply gradients in place by a 0-dimensional factor, in a few launches for any number of them."""
    grads = [grad.to_local() if hasattr(grad, "to_local") else grad for grad in grads]
    for device in {grad.device for grad in grads}:
        torch._foreach_mul_([grad for grad in grads if grad.device == device], factor.to(device, non_blocking=True))


def not_finite(number: Tensor) -> Tensor:
    """1.0 if a number is inf or NaN, else 0.0, in fp32: both times 0 are NaN."""
    return torch.nan_to_num((number * 0.0).float(), nan=1.0)
