"""The elementwise parts of SwiGLU as Triton kernels: each reads its inputs once and writes its outputs once.

The same functions as in `elementwise`, with the same rounding, for contiguous fp16, bf16 and fp32 tensors. They run
at the speed of memory, so their cost is their bytes (b = bytes an element): forward 3b; backward 6b, which is
∂L/∂z, g and u in and ∂L/∂g, ∂L/∂u and z out in one pass. Where a buffer is no longer needed the output is
written over it, so that backward needs no memory beyond ∂L/∂z.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from .elementwise import GROUP, groups

BLOCK = 2048  # elements a program; 16-byte accesses for 8 warps
ROWS = 16  # groups of 128 a program in the 8-bit kernels


def activate(g: Tensor, u: Tensor, overwrite: bool = False) -> Tensor:
    z = g if overwrite else torch.empty_like(g)
    _launch(_activate, g.numel(), BLOCK, g, u, z, z, KEEP=False, BLOCK=BLOCK)
    return z


def activate_keeping(g: Tensor, u: Tensor) -> tuple[Tensor, Tensor]:
    s, z = torch.empty_like(g), torch.empty_like(g)
    _launch(_activate, g.numel(), BLOCK, g, u, z, s, KEEP=True, BLOCK=BLOCK)
    return s, z


def activate_packing(g: Tensor, u: Tensor, overwrite: bool = False) -> tuple[Tensor, list[Tensor]]:
    z = g if overwrite else torch.empty_like(g)
    packed = [torch.empty_like(tensor, dtype=torch.int8) for tensor in (g, u)]
    scales = [torch.empty(groups(g.numel()), dtype=torch.float32, device=g.device) for _ in range(2)]
    _launch(_activate_packing, g.numel(), ROWS * GROUP, g, u, z, *packed, *scales, GROUP=GROUP, ROWS=ROWS)
    return z, [*packed, *scales]


def differentiate(
    dz: Tensor, g: Tensor, u: Tensor, overwrite: bool = False, s: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    dg, du = (g, u) if overwrite else (torch.empty_like(g), torch.empty_like(u))
    tensors = (dz, g, g if s is None else s, u, dg, du)
    _launch(_differentiate, g.numel(), BLOCK, *tensors, SAVED=s is not None, BLOCK=BLOCK)
    return dg, du, dz


def differentiate_packed(dz: Tensor, saved: list[Tensor]) -> tuple[Tensor, Tensor, Tensor]:
    dg, du = torch.empty_like(dz), torch.empty_like(dz)
    _launch(_differentiate_packed, dz.numel(), ROWS * GROUP, dz, *saved, dg, du, GROUP=GROUP, ROWS=ROWS)
    return dg, du, dz


def _launch(kernel, elements: int, per_program: int, *tensors: Tensor, **constants: int) -> None:
    """Run a kernel on the tensors' device; Triton itself would take the current one."""
    if elements:
        with torch.cuda.device_of(tensors[0]):
            kernel[(triton.cdiv(elements, per_program),)](*tensors, elements, **constants, num_warps=8)


@triton.jit
def _activate(g_at, u_at, z_at, s_at, elements, KEEP: tl.constexpr, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < elements
    g = tl.load(g_at + at, mask=inside).to(tl.float32)
    u = tl.load(u_at + at, mask=inside).to(tl.float32)
    s = g * tl.sigmoid(g)
    if KEEP:
        saved = s.to(s_at.dtype.element_ty)
        tl.store(s_at + at, saved, mask=inside)
        s = saved.to(tl.float32)
    tl.store(z_at + at, (s * u).to(z_at.dtype.element_ty), mask=inside)


@triton.jit
def _gradients(dz, g, u):
    """∂L/∂g, ∂L/∂u and SiLU(g), all in fp32."""
    sigma = tl.sigmoid(g)
    s = g * sigma
    return dz * u * sigma * (1 + g * (1 - sigma)), dz * s, s


@triton.jit
def _differentiate(
    dz_at, g_at, s_at, u_at, dg_at, du_at, elements, SAVED: tl.constexpr, BLOCK: tl.constexpr
):  # z is written over dz
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < elements
    dz = tl.load(dz_at + at, mask=inside).to(tl.float32)
    g = tl.load(g_at + at, mask=inside).to(tl.float32)
    u = tl.load(u_at + at, mask=inside).to(tl.float32)
    dg, du, s = _gradients(dz, g, u)
    if SAVED:
        s = tl.load(s_at + at, mask=inside).to(tl.float32)
        du = dz * s
    tl.store(dg_at + at, dg.to(dg_at.dtype.element_ty), mask=inside)
    tl.store(du_at + at, du.to(du_at.dtype.element_ty), mask=inside)
    tl.store(dz_at + at, (s * u).to(dz_at.dtype.element_ty), mask=inside)


@triton.jit
def _pack(values, packed_at, scale_at, at, row, inside, row_inside):
    """`values` (ROWS, GROUP) in 8 bits, and the scale of each row."""
    largest = tl.max(tl.abs(values), axis=1)
    undefined = tl.max((values != values).to(tl.int32), axis=1) > 0  # tl.max passes over NaN
    largest = tl.where(undefined, float("nan"), largest)
    steps = tl.where(largest > 0, 127.0 / largest, 0.0)
    packed = tl.floor(values * steps[:, None] + 0.5).to(tl.int8)
    tl.store(packed_at + at, packed, mask=inside)
    tl.store(scale_at + row, largest / 127.0, mask=row_inside)


@triton.jit
def _activate_packing(
    g_at,
    u_at,
    z_at,
    packed_g_at,
    packed_u_at,
    scale_g_at,
    scale_u_at,
    elements,
    GROUP: tl.constexpr,
    ROWS: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    at = row[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    inside, row_inside = at < elements, row * GROUP < elements
    g = tl.load(g_at + at, mask=inside, other=0.0).to(tl.float32)
    u = tl.load(u_at + at, mask=inside, other=0.0).to(tl.float32)
    _pack(g, packed_g_at, scale_g_at, at, row, inside, row_inside)
    _pack(u, packed_u_at, scale_u_at, at, row, inside, row_inside)
    tl.store(z_at + at, (g * tl.sigmoid(g) * u).to(z_at.dtype.element_ty), mask=inside)


@triton.jit
def _differentiate_packed(
    dz_at,
    packed_g_at,
    packed_u_at,
    scale_g_at,
    scale_u_at,
    dg_at,
    du_at,
    elements,
    GROUP: tl.constexpr,
    ROWS: tl.constexpr,
):  # z is written over dz; g and u are rounded to the gradient's dtype, as if they had been saved in it
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    at = row[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    inside, row_inside = at < elements, row * GROUP < elements
    scale_g = tl.load(scale_g_at + row, mask=row_inside, other=0.0)[:, None]
    scale_u = tl.load(scale_u_at + row, mask=row_inside, other=0.0)[:, None]
    dtype = dg_at.dtype.element_ty
    g = (tl.load(packed_g_at + at, mask=inside, other=0).to(tl.float32) * scale_g).to(dtype).to(tl.float32)
    u = (tl.load(packed_u_at + at, mask=inside, other=0).to(tl.float32) * scale_u).to(dtype).to(tl.float32)
    dz = tl.load(dz_at + at, mask=inside, other=0.0).to(tl.float32)
    dg, du, s = _gradients(dz, g, u)
    tl.store(dg_at + at, dg.to(dtype), mask=inside)
    tl.store(du_at + at, du.to(dtype), mask=inside)
    tl.store(dz_at + at, (s * u).to(dtype), mask=inside)
