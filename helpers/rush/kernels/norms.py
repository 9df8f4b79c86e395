"""RMSNorm and LayerNorm over the last dimension, each an autograd node of one kernel forward and two backward.

For backward it keeps x and one fp32 number a row (LayerNorm: two). Under autocast the result has autocast's type, and x
is read in its own: torch's norms return fp32 there, which the next matrix product copies to half precision and keeps.
The `add_` functions add a residual first and return the sum too. Double backward isn't supported.
"""

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from helpers.lab.precision import autocast_dtype

from . import norms_plain
from .where import on_triton


def rms_norm(x: Tensor, weight: Tensor | None = None, eps: float | None = None) -> Tensor:
    """x / √(mean(x²) + eps) · weight; `eps` as `F.rms_norm` takes it: by default that of the type computed in."""
    _check(x, None, weight, None)
    return _Norm.apply(x, None, weight, None, _rms_eps(x, eps), False, _out_dtype(x))


def layer_norm(x: Tensor, weight: Tensor | None = None, bias: Tensor | None = None, eps: float = 1e-5) -> Tensor:
    """(x − mean) / √(variance + eps) · weight + bias."""
    _check(x, None, weight, bias)
    return _Norm.apply(x, None, weight, bias, eps, True, _out_dtype(x))


def add_rms_norm(
    x: Tensor, residual: Tensor, weight: Tensor | None = None, eps: float | None = None
) -> tuple[Tensor, Tensor]:
    """`rms_norm(x + residual)` and `x + residual`, which is read and written once instead of three times."""
    _check(x, residual, weight, None)
    return _Norm.apply(x, residual, weight, None, _rms_eps(x, eps), False, _out_dtype(x, residual))


def add_layer_norm(
    x: Tensor, residual: Tensor, weight: Tensor | None = None, bias: Tensor | None = None, eps: float = 1e-5
) -> tuple[Tensor, Tensor]:
    """`layer_norm(x + residual)` and `x + residual`."""
    _check(x, residual, weight, bias)
    return _Norm.apply(x, residual, weight, bias, eps, True, _out_dtype(x, residual))


class _Norm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx,
        x: Tensor,
        residual: Tensor | None,
        weight: Tensor | None,
        bias: Tensor | None,
        eps: float,
        centred: bool,
        out: torch.dtype,
    ) -> Tensor | tuple[Tensor, Tensor]:
        run = forward_opaque if torch.compiler.is_compiling() else _forward
        found = run(x, residual, weight, bias, eps, centred, out)
        y, rstd = found[0], found[1]
        mean = found[2] if centred else None
        total = found[-1] if residual is not None else x
        if any(ctx.needs_input_grad):
            ctx.save_for_backward(total, weight, mean, rstd)
            ctx.set_materialize_grads(False)
            ctx.x_dtype = x.dtype
            ctx.residual_dtype = None if residual is None else residual.dtype
            ctx.bias_dtype = None if bias is None else bias.dtype
        return y if residual is None else (y, total)

    @staticmethod
    @once_differentiable
    def backward(ctx, dy: Tensor | None, dtotal: Tensor | None = None) -> tuple[Tensor | None, ...]:
        total, weight, mean, rstd = ctx.saved_tensors
        _, _, need_weight, need_bias = ctx.needs_input_grad[:4]
        dx, dweight, dbias = dtotal, None, None
        if dy is not None:
            run = backward_opaque if torch.compiler.is_compiling() else _backward
            found = run(dy, total, dtotal, weight, mean, rstd, need_weight, need_bias)
            dx = found[0]
            dweight = found[1] if need_weight else None
            dbias = found[-1].to(ctx.bias_dtype) if need_bias else None
        if dx is None:
            return None, None, None, None, None, None, None
        dresidual = None if ctx.residual_dtype is None else dx.to(ctx.residual_dtype)
        return dx.to(ctx.x_dtype), dresidual, dweight, dbias, None, None, None


def _forward(
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    centred: bool,
    out: torch.dtype,
) -> list[Tensor]:
    """y and rstd, then the mean of a LayerNorm, then the sum if there is a residual."""
    kernels = _kernels_for(x, residual, weight, bias)
    rows = None if residual is None else _rows(residual)
    y, total, mean, rstd = kernels.forward(_rows(x), rows, _flat(weight), _flat(bias), eps, centred, out)
    found = [y.view(x.shape), rstd] + ([mean] if centred else [])
    return found if residual is None else [*found, total.view(x.shape)]


def _backward(
    dy: Tensor,
    x: Tensor,
    dx_more: Tensor | None,
    weight: Tensor | None,
    mean: Tensor | None,
    rstd: Tensor,
    need_weight: bool,
    need_bias: bool,
) -> list[Tensor]:
    """The gradient of x, then those of weight and bias that are needed, in the weight's type."""
    kernels = _kernels_for(dy, x, dx_more, weight)
    out = torch.float32 if weight is None else weight.dtype
    more = None if dx_more is None else _rows(dx_more)
    dx, dweight, dbias = kernels.backward(
        _rows(dy), _rows(x), more, _flat(weight), mean, rstd, need_weight, need_bias, out
    )
    # An operator's results are tensors of their own; these two are halves of one.
    dbias = dbias.clone() if need_weight and need_bias else dbias
    return [dx.view(x.shape), *(grad for grad in (dweight, dbias) if grad is not None)]


forward_opaque = torch.library.custom_op("helpers_rush::norm_forward", _forward, mutates_args=())
backward_opaque = torch.library.custom_op("helpers_rush::norm_backward", _backward, mutates_args=())


@forward_opaque.register_fake
def _(x, residual, weight, bias, eps, centred, out):
    total = x if residual is None else x.new_empty(x.shape, dtype=torch.promote_types(x.dtype, residual.dtype))
    statistic = x.new_empty(x.numel() // x.shape[-1], dtype=torch.promote_types(total.dtype, torch.float32))
    found = [x.new_empty(x.shape, dtype=out), statistic] + ([torch.empty_like(statistic)] if centred else [])
    return found if residual is None else [*found, total]


@backward_opaque.register_fake
def _(dy, x, dx_more, weight, mean, rstd, need_weight, need_bias):
    out = torch.float32 if weight is None else weight.dtype
    sums = [x.new_empty(x.shape[-1], dtype=out) for _ in range(need_weight + need_bias)]
    return [x.new_empty(x.shape), *sums]


def _kernels_for(x: Tensor, *others: Tensor | None):
    """Triton's module where it takes these tensors, else plain torch's."""
    if on_triton(x, *others):
        from . import norms_triton

        if x.shape[-1] <= norms_triton.WIDEST:
            return norms_triton
    return norms_plain


def _rows(tensor: Tensor) -> Tensor:
    """(…, width) as (rows, width) with each row contiguous: a view where there is one."""
    rows = tensor.reshape(-1, tensor.shape[-1])
    return rows if rows.stride(1) == 1 else rows.contiguous()


def _flat(parameter: Tensor | None) -> Tensor | None:
    return None if parameter is None else parameter.contiguous()


def _out_dtype(*tensors: Tensor) -> torch.dtype:
    dtype = tensors[0].dtype if len(tensors) == 1 else torch.promote_types(tensors[0].dtype, tensors[1].dtype)
    return dtype if dtype == torch.float64 else autocast_dtype(tensors[0]) or dtype


def _rms_eps(x: Tensor, eps: float | None) -> float:
    return torch.finfo(torch.promote_types(x.dtype, torch.float32)).eps if eps is None else eps


def _check(x: Tensor, residual: Tensor | None, weight: Tensor | None, bias: Tensor | None) -> None:
    if x.dim() == 0 or x.shape[-1] == 0 or not x.is_floating_point():
        raise ValueError(f"x must be floating-point with a last dimension of at least 1, not {_said(x)}")
    if residual is not None and residual.shape != x.shape:
        raise ValueError(f"residual must have x's shape {tuple(x.shape)}, not {tuple(residual.shape)}")
    for name, parameter in (("weight", weight), ("bias", bias)):
        if parameter is not None and parameter.shape != x.shape[-1:]:
            raise ValueError(f"{name} must have shape ({x.shape[-1]},), not {tuple(parameter.shape)}")


def _said(x: Tensor) -> str:
    return f"{x.dtype} of shape {tuple(x.shape)}"
