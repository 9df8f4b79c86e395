"""RMSNorm and LayerNorm in plain torch: the functions and the results of `norms_triton`, on any device and in fp64.

Statistics are in fp32 (fp64 for fp64). It runs a dozen passes over the rows where the kernels make one.
"""

import torch
from torch import Tensor


def forward(
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    centred: bool,
    out: torch.dtype,
) -> tuple[Tensor, Tensor, Tensor | None, Tensor]:
    total = x if residual is None else x + residual
    wide = _wide(total)
    mean = wide.mean(1) if centred else None
    if mean is not None:
        wide = wide - mean[:, None]
    rstd = torch.rsqrt(wide.square().mean(1) + eps)
    y = wide * rstd[:, None]
    if weight is not None:
        y = y * weight
    if bias is not None:
        y = y + bias
    return y.to(out), total, mean, rstd


def backward(
    dy: Tensor,
    x: Tensor,
    dx_more: Tensor | None,
    weight: Tensor | None,
    mean: Tensor | None,
    rstd: Tensor,
    need_weight: bool,
    need_bias: bool,
    out: torch.dtype,
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    dy, normed = _wide(dy), (_wide(x) if mean is None else _wide(x) - mean[:, None]) * rstd[:, None]
    dweight = (dy * normed).sum(0).to(out) if need_weight else None
    dbias = dy.sum(0).to(out) if need_bias else None
    if weight is not None:
        dy = dy * weight
    dx = dy - normed * (dy * normed).mean(1, keepdim=True)
    if mean is not None:
        dx = dx - dy.mean(1, keepdim=True)
    dx = dx * rstd[:, None]
    if dx_more is not None:
        dx = dx + dx_more
    return dx.to(x.dtype), dweight, dbias


def _wide(tensor: Tensor) -> Tensor:
    return tensor.to(torch.promote_types(tensor.dtype, torch.float32))
