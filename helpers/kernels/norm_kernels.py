"""The norms' Triton kernels, their launches, and the check whether tensors can use them.

`triton` and `tl` are None where Triton isn't installed (torch's CUDA builds include it, except on Windows): then
`norms` computes the same in plain torch.
"""

import torch
from torch import Tensor

try:
    import triton
    import triton.language as tl
except ImportError:
    triton = tl = None

DTYPES = (torch.float16, torch.bfloat16, torch.float32)
AHEAD = 2**16  # bytes of shared memory that a program may use for prefetched blocks
TILE = 1024  # elements that a program processes at a time, in full rows; a wider row is a tile of its own
RESIDENT, REGISTERS = 1024, 64  # backward: threads on each multiprocessor, and registers a thread, so that they all fit
SHARES, COLUMNS = 64, 32  # the tile of the kernel that adds the partial sums of the weight's gradient


def on_triton(*tensors: Tensor | None) -> bool:
    """Whether the Triton kernels support all of these tensors: on a GPU, in fp32 or half precision."""
    return triton is not None and all(t is None or (t.is_cuda and t.dtype in DTYPES) for t in tensors)


def launch(kernel, programs: int, *arguments, **constants) -> None:
    """Run a kernel on the first tensor's device; Triton itself would take the current one."""
    if programs:
        with torch.cuda.device_of(arguments[0]):
            kernel[(programs,)](*arguments, **constants)


def stages(block_bytes: int) -> int:
    """Triton's `num_stages` for a loop over blocks: 3 prefetches two blocks while one is processed, 1 none."""
    return 1 + min(2, AHEAD // block_bytes)


def as_rows(tensor: Tensor) -> Tensor:
    """(…, width) as (rows, width) with each row contiguous: a view where there is one."""
    rows = tensor.reshape(-1, tensor.shape[-1])
    return rows if rows.stride(1) == 1 else rows.contiguous()


def contiguous(parameter: Tensor | None) -> Tensor | None:
    return None if parameter is None else parameter.contiguous()


def tile(width: int, elements_per_thread: int) -> tuple[int, int, int]:
    """Rows and columns (powers of two) of a program's tile, and its warps."""
    block = triton.next_power_of_2(width)
    rows = max(1, TILE // block)
    return rows, block, min(32, rows * block // (32 * elements_per_thread))


def forward_on_triton(
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


def backward_on_triton(
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
