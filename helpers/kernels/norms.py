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
from .launch import as_rows, contiguous, launch, on_triton, stages, tl, triton

OPERATORS = __name__.partition(".")[0]  # the package has two names, which share no operator
WIDEST = 16384  # elements a row: a wider row doesn't fit in the registers of a program
TILE = 1024  # elements that a program processes at a time, in full rows; a wider row is a tile of its own
RESIDENT, REGISTERS = 1024, 64  # backward: threads on each multiprocessor, and registers a thread, so that they all fit
SHARES, COLUMNS = 64, 32  # the tile of the kernel that adds the partial sums of the weight's gradient


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
        y, *others = _forward_on_triton(rows, weight, bias, eps, centred, out, branches)
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
        dx, *sums = _backward_on_triton(upstream, rows, contiguous(weight), rstd, mean, *needs, out, beside)
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


def tile(width: int, elements_per_thread: int) -> tuple[int, int, int]:
    """Rows and columns (powers of two) of a program's tile, and its warps."""
    block = triton.next_power_of_2(width)
    rows = max(1, TILE // block)
    return rows, block, min(32, rows * block // (32 * elements_per_thread))


def _forward_on_triton(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    centred: bool,
    out: torch.dtype,
    branch: Tensor | None,
) -> list[Tensor]:
    count, width = x.shape
    step, total = 0, None
    if branch is not None:
        step = branch.stride(0)
        total = torch.empty((count, width), dtype=torch.promote_types(x.dtype, branch.dtype), device=x.device)
    y = torch.empty((count, width), dtype=out, device=x.device)
    rstd = torch.empty(count, dtype=torch.float32, device=x.device)
    mean = torch.empty_like(rstd) if centred else None
    rows, block, warps = tile(width, 16)
    launch(
        _forward_kernel, triton.cdiv(count, rows),
        x, branch, weight, bias, y, total, mean, rstd, count, x.stride(0), step, eps,
        WIDTH=width, ROWS=rows, BLOCK=block, CENTRED=centred, num_warps=warps,
    )  # fmt: skip
    return [tensor for tensor in (y, rstd, mean, total) if tensor is not None]


def _backward_on_triton(
    dy: Tensor,
    x: Tensor,
    weight: Tensor | None,
    rstd: Tensor,
    mean: Tensor | None,
    need_weight: bool,
    need_bias: bool,
    out: torch.dtype,
    further: Tensor | None,
) -> list[Tensor]:
    count, width = x.shape
    dx = torch.empty((count, width), dtype=x.dtype, device=x.device)
    rows, block, warps = tile(width, 8)
    # Triton's interpreter, on the CPU, counts as two processors.
    processors = torch.cuda.get_device_properties(x.device).multi_processor_count if x.is_cuda else 2
    resident = max(1, RESIDENT // (32 * warps)) * processors
    programs = max(1, min(resident, triton.cdiv(count, rows)))
    row_bytes = (dy.element_size() + x.element_size()) * rows * block
    learned = need_weight + need_bias
    shares = torch.empty((programs, learned * width), dtype=torch.float32, device=x.device) if learned else None
    launch(
        _backward_kernel, programs,
        dy, x, further, weight, mean, rstd, dx, shares, count, dy.stride(0), x.stride(0),
        0 if further is None else further.stride(0),
        WIDTH=width, ROWS=rows, BLOCK=block, WEIGHT=need_weight, BIAS=need_bias,
        STAGES=stages(row_bytes), num_warps=warps, **({} if torch.version.hip else {"maxnreg": REGISTERS}),
    )  # fmt: skip
    if not learned:
        return [dx]
    sums = torch.empty(learned * width, dtype=out, device=x.device)
    launch(
        _sum_kernel, triton.cdiv(learned * width, COLUMNS), shares, sums, programs,
        WIDTH=learned * width, ROWS=SHARES, COLUMNS=COLUMNS, num_warps=4,
    )  # fmt: skip
    # Results of a custom operator must not share memory, so the second half is copied.
    return [dx, sums] if learned == 1 else [dx, sums[:width], sums[width:].clone()]


if triton is not None:

    @triton.jit
    def _forward_kernel(
        x_at, branch_at, weight_at, bias_at, y_at, total_at, mean_at, rstd_at, count, x_step, branch_step, eps,
        WIDTH: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, CENTRED: tl.constexpr,
    ):  # fmt: skip
        row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
        column = tl.arange(0, BLOCK)
        in_row, in_column = row < count, column < WIDTH
        inside = in_row[:, None] & in_column[None, :]
        x = tl.load(x_at + row[:, None] * x_step + column[None, :], mask=inside, other=0.0).to(tl.float32)
        if branch_at is not None:
            x += tl.load(branch_at + row[:, None] * branch_step + column[None, :], mask=inside, other=0.0).to(
                tl.float32
            )
            total = x.to(total_at.dtype.element_ty)  # rounded, as a sum of its own would be
            tl.store(total_at + row[:, None] * WIDTH + column[None, :], total, mask=inside)
            x = total.to(tl.float32)
        if CENTRED:
            mean = tl.sum(x, axis=1) / WIDTH
            tl.store(mean_at + row, mean, mask=in_row)
            x = tl.where(inside, x - mean[:, None], 0.0)
        rstd = tl.rsqrt(tl.sum(x * x, axis=1) / WIDTH + eps)
        tl.store(rstd_at + row, rstd, mask=in_row)
        y = x * rstd[:, None]
        if weight_at is not None:
            y *= tl.load(weight_at + column, mask=in_column, other=0.0).to(tl.float32)[None, :]
        if bias_at is not None:
            y += tl.load(bias_at + column, mask=in_column, other=0.0).to(tl.float32)[None, :]
        tl.store(y_at + row[:, None] * WIDTH + column[None, :], y.to(y_at.dtype.element_ty), mask=inside)

    @triton.jit
    def _backward_kernel(
        dy_at, x_at, further_at, weight_at, mean_at, rstd_at, dx_at, shares_at, count, dy_step, x_step, further_step,
        WIDTH: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, WEIGHT: tl.constexpr, BIAS: tl.constexpr,
        STAGES: tl.constexpr,
    ):  # fmt: skip
        column = tl.arange(0, BLOCK)
        in_column = column < WIDTH
        if weight_at is not None:
            weight = tl.load(weight_at + column, mask=in_column, other=0.0)[None, :]
        dweight = tl.zeros((ROWS, BLOCK), tl.float32)
        dbias = tl.zeros((ROWS, BLOCK), tl.float32)
        for first in tl.range(tl.program_id(0) * ROWS, count, tl.num_programs(0) * ROWS, num_stages=STAGES):
            row = first + tl.arange(0, ROWS).to(tl.int64)
            in_row = row < count
            inside = in_row[:, None] & in_column[None, :]
            dy = tl.load(dy_at + row[:, None] * dy_step + column[None, :], mask=inside, other=0.0).to(tl.float32)
            x = tl.load(x_at + row[:, None] * x_step + column[None, :], mask=inside, other=0.0).to(tl.float32)
            rstd = tl.load(rstd_at + row, mask=in_row, other=0.0)[:, None]
            if mean_at is not None:
                x -= tl.load(mean_at + row, mask=in_row, other=0.0)[:, None]
            x *= rstd  # normalised; outside the row dy is zero
            if WEIGHT:
                dweight += dy * x
            if BIAS:
                dbias += dy
            if weight_at is not None:
                dy *= weight.to(tl.float32)
            dx = dy - x * (tl.sum(dy * x, axis=1) / WIDTH)[:, None]
            if mean_at is not None:
                dx -= (tl.sum(dy, axis=1) / WIDTH)[:, None]
            dx *= rstd
            if further_at is not None:
                dx += tl.load(further_at + row[:, None] * further_step + column[None, :], mask=inside, other=0.0).to(
                    tl.float32
                )
            tl.store(dx_at + row[:, None] * WIDTH + column[None, :], dx.to(dx_at.dtype.element_ty), mask=inside)
        share = tl.program_id(0).to(tl.int64) * (WEIGHT + BIAS) * WIDTH + column
        if WEIGHT:
            tl.store(shares_at + share, tl.sum(dweight, axis=0), mask=in_column)
        if BIAS:
            tl.store(shares_at + share + WEIGHT * WIDTH, tl.sum(dbias, axis=0), mask=in_column)

    @triton.jit
    def _sum_kernel(shares_at, sums_at, count, WIDTH: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
        column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
        in_column = column < WIDTH
        total = tl.zeros((ROWS, COLUMNS), tl.float32)
        for first in range(0, count, ROWS):
            row = first + tl.arange(0, ROWS)
            inside = (row < count)[:, None] & in_column[None, :]
            total += tl.load(shares_at + row[:, None] * WIDTH + column[None, :], mask=inside, other=0.0)
        tl.store(sums_at + column, tl.sum(total, axis=0).to(sums_at.dtype.element_ty), mask=in_column)
