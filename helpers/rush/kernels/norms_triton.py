"""RMSNorm and LayerNorm as Triton kernels: a row is read once, held in registers, and written once.

What they cost, for b bytes an element: forward 2b (x in, y out); backward 3b (∂L/∂y and x in, ∂L/∂x out); 5b together,
10 bytes in bf16. With the residual addition inside, 4b and 4b instead of the 11b of an addition and a norm apart. To
that come 4 bytes a row for each statistic, and the shares of the weight's gradient.

Backward runs as many programs as fit on the GPU at once. Each walks over its rows, the next two of them already on
their way to shared memory, with its share of the weight's gradient in registers. It writes that share once, and a
second kernel adds the shares up in a fixed order: the same gradient on every run, and no element read again for it.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from .where import launch, processors

WIDEST = 16384  # elements a row: beyond that a row no longer fits in the registers of a program
TILE = 1024  # elements a program holds at a time, in whole rows; wider rows are held alone
RESIDENT, REGISTERS = 1024, 64  # threads of backward on each multiprocessor; what each may use so that they all fit
AHEAD = 2**16  # bytes of shared memory in which a program of backward may keep rows that it will need next
SHARES, COLUMNS = 64, 32  # the tile in which the shares of the weight's gradient are added up


def tile(width: int, elements_per_thread: int) -> tuple[int, int, int]:
    """Rows and columns (powers of two) that a program holds, and its warps."""
    block = triton.next_power_of_2(width)
    rows = max(1, TILE // block)
    return rows, block, min(32, rows * block // (32 * elements_per_thread))


def stages(tile_bytes: int) -> int:
    """How far backward's pipeline reaches: 3 is two tiles on their way while one is worked on, 1 is no pipeline."""
    return 1 + min(2, AHEAD // tile_bytes)


def forward(
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    centred: bool,
    out: torch.dtype,
) -> tuple[Tensor, Tensor, Tensor | None, Tensor]:
    """y, what was normalised (x, or x + residual), the rows' means if `centred`, and 1 / their deviations."""
    count, width = x.shape
    y = torch.empty((count, width), dtype=out, device=x.device)
    total = x if residual is None else torch.empty((count, width), dtype=_sum_dtype(x, residual), device=x.device)
    rstd = torch.empty(count, dtype=torch.float32, device=x.device)
    mean = torch.empty_like(rstd) if centred else None
    rows, block, warps = tile(width, 16)
    launch(
        _forward,
        triton.cdiv(count, rows),
        x, residual, weight, bias, y, total, mean, rstd,
        *(count, x.stride(0), 0 if residual is None else residual.stride(0), eps),
        WIDTH=width, ROWS=rows, BLOCK=block, CENTRED=centred, num_warps=warps,
    )  # fmt: skip
    return y, total, mean, rstd


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
    """∂L/∂x (`dx_more` added to it), and the gradients of weight and bias that are needed, in `out`."""
    count, width = x.shape
    dx = torch.empty((count, width), dtype=x.dtype, device=x.device)
    rows, block, warps = tile(width, 8)
    resident = max(1, RESIDENT // (32 * warps)) * processors(x)
    programs = max(1, min(resident, triton.cdiv(count, rows)))
    row_bytes = sum(t.element_size() for t in (dy, x, dx_more) if t is not None) * rows * block
    learned = need_weight + need_bias
    shares = torch.empty((programs, learned * width), dtype=torch.float32, device=x.device) if learned else None
    launch(
        _backward,
        programs,
        dy, x, dx_more, weight, mean, rstd, dx, shares,
        *(count, dy.stride(0), x.stride(0), 0 if dx_more is None else dx_more.stride(0)),
        WIDTH=width, ROWS=rows, BLOCK=block, WEIGHT=need_weight, BIAS=need_bias,
        STAGES=stages(row_bytes), num_warps=warps, maxnreg=REGISTERS,
    )  # fmt: skip
    if not learned:
        return dx, None, None
    sums = torch.empty(learned * width, dtype=out, device=x.device)
    launch(
        _add_up, triton.cdiv(learned * width, COLUMNS), shares, sums, programs,
        WIDTH=learned * width, ROWS=SHARES, COLUMNS=COLUMNS, num_warps=4,
    )  # fmt: skip
    return dx, sums[:width] if need_weight else None, sums[-width:] if need_bias else None


def _sum_dtype(x: Tensor, residual: Tensor) -> torch.dtype:
    return torch.promote_types(x.dtype, residual.dtype)


@triton.jit
def _forward(
    x_at, residual_at, weight_at, bias_at, y_at, total_at, mean_at, rstd_at,
    count, x_step, residual_step, eps,
    WIDTH: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, CENTRED: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, BLOCK)
    in_row, in_column = row < count, column < WIDTH
    inside = in_row[:, None] & in_column[None, :]
    x = tl.load(x_at + row[:, None] * x_step + column[None, :], mask=inside, other=0.0)
    if residual_at is not None:
        more = tl.load(residual_at + row[:, None] * residual_step + column[None, :], mask=inside, other=0.0)
        x = (x.to(tl.float32) + more.to(tl.float32)).to(total_at.dtype.element_ty)
        tl.store(total_at + row[:, None] * WIDTH + column[None, :], x, mask=inside)
    x = x.to(tl.float32)
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
def _backward(
    dy_at, x_at, more_at, weight_at, mean_at, rstd_at, dx_at, shares_at,
    count, dy_step, x_step, more_step,
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
        x *= rstd  # normalised; where outside the row, dy is zero
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
        if more_at is not None:
            dx += tl.load(more_at + row[:, None] * more_step + column[None, :], mask=inside, other=0.0).to(tl.float32)
        tl.store(dx_at + row[:, None] * WIDTH + column[None, :], dx.to(dx_at.dtype.element_ty), mask=inside)
    share = tl.program_id(0).to(tl.int64) * (WEIGHT + BIAS) * WIDTH + column
    if WEIGHT:
        tl.store(shares_at + share, tl.sum(dweight, axis=0), mask=in_column)
    if BIAS:
        tl.store(shares_at + share + WEIGHT * WIDTH, tl.sum(dbias, axis=0), mask=in_column)


@triton.jit
def _add_up(shares_at, sums_at, count, WIDTH: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    in_column = column < WIDTH
    total = tl.zeros((ROWS, COLUMNS), tl.float32)
    for first in range(0, count, ROWS):
        row = first + tl.arange(0, ROWS)
        inside = (row < count)[:, None] & in_column[None, :]
        total += tl.load(shares_at + row[:, None] * WIDTH + column[None, :], mask=inside, other=0.0)
    tl.store(sums_at + column, tl.sum(total, axis=0).to(sums_at.dtype.element_ty), mask=in_column)
