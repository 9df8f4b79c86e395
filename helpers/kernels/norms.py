"""RMSNorm and LayerNorm over the last dimension, each an autograd node of one Triton kernel forward and two backward.

A row is read once, kept in registers, and written once. At b bytes an element that moves 2b forward (x in, y out) and
3b backward (∂L/∂y and x in, ∂L/∂x out), together 10 bytes in bf16; in addition 4 bytes a row for each statistic, and
the partial sums of the weight's gradient. The fallback in plain torch makes a dozen passes.

Backward runs as many programs as fit on the GPU at once. Each loops over its rows, prefetching two of them to shared
memory, and accumulates a partial sum of the weight's gradient in registers. It writes that once, and a second kernel
adds the partial sums in a fixed order: the gradient is deterministic, and no element is read twice.

`add_rms_norm` adds a residual branch first, in the same kernels: the sum is written once and not read again, and in
backward its own gradient is added to the norm's before that is written.

Saved for backward are x and one fp32 number a row (LayerNorm: two). Under autocast the result has autocast's dtype, and
x is read in its own; torch's norms return fp32 there, which the next matrix product copies to half precision and saves.
Double backward isn't supported.
"""

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from ..lab.precision import autocast_dtype
from .norm_kernels import as_rows, backward_on_triton, contiguous, forward_on_triton, on_triton

OPERATORS = __name__.partition(".")[0]  # the package has two names, which share no operator
WIDEST = 16384  # elements a row: a wider row doesn't fit in the registers of a program


def rms_norm(x: Tensor, weight: Tensor | None = None, eps: float | None = None) -> Tensor:
    """x / √(mean(x²) + eps) · weight; the default `eps` is the compute dtype's machine epsilon, as in `F.rms_norm`."""
    _check(x, weight, None)
    eps = torch.finfo(torch.promote_types(x.dtype, torch.float32)).eps if eps is None else eps
    return _Norm.apply(x, weight, None, eps, False, autocast_dtype(x) or x.dtype)


def add_rms_norm(x: Tensor, branch: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """`rms_norm(x + branch)`, and x + branch."""
    _check(x, weight, None)
    if branch.shape != x.shape:
        raise ValueError(f"branch must have the shape of x, {tuple(x.shape)}, not {tuple(branch.shape)}")
    return _AddNorm.apply(x, branch, weight, eps, autocast_dtype(x) or x.dtype)


def layer_norm(x: Tensor, weight: Tensor | None = None, bias: Tensor | None = None, eps: float = 1e-5) -> Tensor:
    """(x − mean) / √(variance + eps) · weight + bias."""
    _check(x, weight, bias)
    return _Norm.apply(x, weight, bias, eps, True, autocast_dtype(x) or x.dtype)


class _Norm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx, x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, centred: bool, out: torch.dtype
    ) -> Tensor:
        run = forward_opaque if torch.compiler.is_compiling() else _forward
        results = run(x, weight, bias, eps, centred, out)  # indexed: torch 2.11's compiler can't unpack them
        if any(ctx.needs_input_grad):
            ctx.save_for_backward(x, weight, results[1], results[2] if centred else None)
            ctx.bias_dtype = None if bias is None else bias.dtype
        return results[0]

    @staticmethod
    @once_differentiable
    def backward(ctx, dy: Tensor) -> tuple[Tensor | None, ...]:
        _, need_weight, need_bias = ctx.needs_input_grad[:3]
        run = backward_opaque if torch.compiler.is_compiling() else _backward
        gradients = run(dy, *ctx.saved_tensors, need_weight, need_bias)
        dweight = gradients[1] if need_weight else None
        dbias = gradients[-1].to(ctx.bias_dtype) if need_bias else None
        return gradients[0], dweight, dbias, None, None, None


class _AddNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, branch: Tensor, weight: Tensor, eps: float, out: torch.dtype) -> tuple[Tensor, Tensor]:
        run = forward_opaque if torch.compiler.is_compiling() else _forward
        results = run(x, weight, None, eps, False, out, branch)
        total = results[-1]
        ctx.save_for_backward(total, weight, results[1])
        ctx.dtypes = x.dtype, branch.dtype
        return results[0], total

    @staticmethod
    @once_differentiable
    def backward(ctx, dy: Tensor, dtotal: Tensor) -> tuple[Tensor | None, ...]:
        run = backward_opaque if torch.compiler.is_compiling() else _backward
        total, weight, rstd = ctx.saved_tensors
        gradients = run(dy, total, weight, rstd, None, ctx.needs_input_grad[2], False, dtotal)
        dweight = gradients[1] if ctx.needs_input_grad[2] else None
        return *(gradients[0].to(dtype) for dtype in ctx.dtypes), dweight, None, None


def _forward(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    centred: bool,
    out: torch.dtype,
    branch: Tensor | None = None,
) -> list[Tensor]:
    """y, for each row 1/√(variance + eps), for LayerNorm each row's mean, and x + branch, which y then is of."""
    rows, branches = as_rows(x), None if branch is None else as_rows(branch)  # (N, width)
    if on_triton(x, weight, bias, branch) and x.shape[-1] <= WIDEST:
        weight, bias = contiguous(weight), contiguous(bias)
        y, *others = forward_on_triton(rows, weight, bias, eps, centred, out, branches)
    else:
        total = rows if branches is None else rows + branches
        wide = _wide(total)
        statistics = [wide.mean(1)] if centred else []
        if centred:
            wide = wide - statistics[0][:, None]
        statistics.insert(0, torch.rsqrt(wide.square().mean(1) + eps))
        y = wide * statistics[0][:, None]
        y = y if weight is None else y * weight
        y = (y if bias is None else y + bias).to(out)
        others = statistics if branch is None else [*statistics, total]
    if branch is not None:
        others[-1] = others[-1].view(x.shape)
    return [y.view(x.shape), *others]


def _backward(
    dy: Tensor,
    x: Tensor,
    weight: Tensor | None,
    rstd: Tensor,
    mean: Tensor | None,
    need_weight: bool,
    need_bias: bool,
    further: Tensor | None = None,
) -> list[Tensor]:
    """The gradient of x, then those of weight and bias if needed, in the weight's dtype.

    `further` is the gradient of x by other ways than the norm.
    """
    out = torch.float32 if weight is None else weight.dtype
    rows, upstream = as_rows(x), as_rows(dy)
    beside = None if further is None else as_rows(further)
    if on_triton(dy, x, weight, further) and x.shape[-1] <= WIDEST:
        needs = need_weight, need_bias
        dx, *sums = backward_on_triton(upstream, rows, contiguous(weight), rstd, mean, *needs, out, beside)
    else:
        upstream, wide = _wide(upstream), _wide(rows)
        normed = (wide if mean is None else wide - mean[:, None]) * rstd[:, None]
        sums = [(upstream * normed).sum(0).to(out)] if need_weight else []
        sums += [upstream.sum(0).to(out)] if need_bias else []
        upstream = upstream if weight is None else upstream * weight
        dx = upstream - normed * (upstream * normed).mean(1, keepdim=True)
        if mean is not None:
            dx = dx - upstream.mean(1, keepdim=True)
        dx = dx * rstd[:, None]
        dx = (dx if beside is None else dx + beside).to(x.dtype)
    return [dx.view(x.shape), *sums]


# Opaque operators for compiled graphs; the fake versions give the compiler the results' shapes. Their schemas are
# written out, as torch 2.6 doesn't read `list[Tensor]`.
forward_opaque = torch.library.custom_op(
    f"{OPERATORS}_rush::norm_forward",
    _forward,
    mutates_args=(),
    schema="(Tensor x, Tensor? weight, Tensor? bias, float eps, bool centred, ScalarType out, Tensor? branch=None) "
    "-> Tensor[]",
)
backward_opaque = torch.library.custom_op(
    f"{OPERATORS}_rush::norm_backward",
    _backward,
    mutates_args=(),
    schema="(Tensor dy, Tensor x, Tensor? weight, Tensor rstd, Tensor? mean, bool need_weight, bool need_bias, "
    "Tensor? further=None) -> Tensor[]",
)


@forward_opaque.register_fake
def _(x, weight, bias, eps, centred, out, branch=None):
    statistic = x.new_empty(x.numel() // x.shape[-1], dtype=torch.promote_types(x.dtype, torch.float32))
    statistics = [statistic, torch.empty_like(statistic)] if centred else [statistic]
    total = [] if branch is None else [x.new_empty(x.shape, dtype=torch.promote_types(x.dtype, branch.dtype))]
    return [x.new_empty(x.shape, dtype=out), *statistics, *total]


@backward_opaque.register_fake
def _(dy, x, weight, rstd, mean, need_weight, need_bias, further=None):
    out = torch.float32 if weight is None else weight.dtype
    return [x.new_empty(x.shape), *(x.new_empty(x.shape[-1], dtype=out) for _ in range(need_weight + need_bias))]


def _wide(tensor: Tensor) -> Tensor:
    return tensor.to(torch.promote_types(tensor.dtype, torch.float32))


def _check(x: Tensor, weight: Tensor | None, bias: Tensor | None) -> None:
    if x.dim() == 0 or x.shape[-1] == 0 or not x.is_floating_point():
        given = f"{x.dtype} of shape {tuple(x.shape)}"
        raise ValueError(f"x must be floating-point with a last dimension of at least 1, not {given}")
    for name, parameter in (("weight", weight), ("bias", bias)):
        if parameter is not None and parameter.shape != x.shape[-1:]:
            raise ValueError(f"{name} must have shape ({x.shape[-1]},), not {tuple(parameter.shape)}")
