"""The elementwise parts of SwiGLU in plain torch, a block of rows at a time, so that temporaries stay in the cache.

With g = xW and u = xV the layer is z = SiLU(g) ⊙ u. Whole tensors at once, each operation would read and write main
memory: ten passes in backward. In blocks of 256 Ki numbers, memory is read and written once, as by a fused kernel: on
two cores 6 to 8 times as fast. Half precision is rounded where the plain module rounds it. The Triton kernels in
`triton_kernels` are the same functions for a GPU.
"""

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

BLOCK = 2**18  # numbers
GROUP = 128  # neighbours that share one scale in 8 bits


def activate(g: Tensor, u: Tensor, overwrite: bool = False) -> Tensor:
    """z = SiLU(g) ⊙ u, written over g if `overwrite`."""
    z = g if overwrite else torch.empty_like(g)
    for g_, u_, z_ in _blocks(g, u, z):
        torch.mul(F.silu(g_), u_, out=z_)
    return z


def activate_keeping(g: Tensor, u: Tensor) -> tuple[Tensor, Tensor]:
    """SiLU(g) and z."""
    s, z = torch.empty_like(g), torch.empty_like(g)
    for g_, u_, s_, z_ in _blocks(g, u, s, z):
        torch.ops.aten.silu.out(g_, out=s_)
        torch.mul(s_, u_, out=z_)
    return s, z


def activate_packing(g: Tensor, u: Tensor, overwrite: bool = False) -> tuple[Tensor, list[Tensor]]:
    """z, written over g if `overwrite`; and g and u in 8 bits, with their scales.

    1 + 4/128 bytes a number: 8-bit integers, and a fp32 scale for each 128 neighbours of the flattened tensor. A scale
    is the group's largest magnitude / 127, so that the error is at most half a step: for normally distributed values
    0.65 % of their standard deviation (root mean square). One outlier costs precision in its own group only; a value
    that isn't finite makes its group not finite.
    """
    z = g if overwrite else torch.empty_like(g)
    packed = [torch.empty_like(tensor, dtype=torch.int8) for tensor in (g, u)]
    scales = [torch.empty(groups(g.numel()), dtype=torch.float32, device=g.device) for _ in range(2)]
    for place, (g_, u_, z_, *packed_) in enumerate(_blocks(g, u, z, *packed)):
        for values, into, scale in zip((g_, u_), packed_, scales, strict=True):
            _pack(values, into, scale[place * BLOCK // GROUP :])
        torch.mul(F.silu(g_), u_, out=z_)
    return z, [*packed, *scales]


def differentiate(
    dz: Tensor, g: Tensor, u: Tensor, overwrite: bool = False, s: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """∂L/∂g, ∂L/∂u and z. z is written over dz, and the gradients over g and u if `overwrite`.

    s = SiLU(g), if it is saved, gains next to nothing: σ(g) is needed all the same.
    """
    dg, du = (g, u) if overwrite else (torch.empty_like(g), torch.empty_like(u))
    for dz_, g_, u_, dg_, du_, *s_ in _blocks(dz, g, u, dg, du, *([] if s is None else [s])):
        _differentiate(dz_, g_, s_[0] if s_ else F.silu(g_), u_, dg_, du_)
    return dg, du, dz


def differentiate_packed(dz: Tensor, saved: list[Tensor]) -> tuple[Tensor, Tensor, Tensor]:
    """The same from g and u in 8 bits."""
    packed_g, packed_u, scale_g, scale_u = saved
    dg, du = torch.empty_like(dz), torch.empty_like(dz)
    for place, (dz_, packed_g_, packed_u_, dg_, du_) in enumerate(_blocks(dz, packed_g, packed_u, dg, du)):
        g_ = _unpack(packed_g_, scale_g[place * BLOCK // GROUP :], dz.dtype)
        u_ = _unpack(packed_u_, scale_u[place * BLOCK // GROUP :], dz.dtype)
        _differentiate(dz_, g_, F.silu(g_), u_, dg_, du_)
    return dg, du, dz


def _differentiate(dz: Tensor, g: Tensor, s: Tensor, u: Tensor, dg: Tensor, du: Tensor) -> None:
    """One block; z is written over dz. dg may be g and du may be u, which are read before they are written."""
    dsilu, z = dz * u, s * u
    torch.mul(dz, s, out=du)
    torch.ops.aten.silu_backward.grad_input(dsilu, g, grad_input=dg)
    dz.copy_(z)


def _pack(values: Tensor, packed: Tensor, scale: Tensor) -> None:
    rows = _grouped(values).to(torch.float32, copy=True)
    largest = rows.abs().amax(dim=1)
    scale[: len(rows)] = largest / 127
    steps = torch.where(largest > 0, 127 / largest, 0.0)
    packed.copy_(rows.mul_(steps[:, None]).round_().view(-1)[: len(values)])


def _unpack(packed: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    rows = _grouped(packed)
    return (rows * scale[: len(rows), None]).view(-1)[: len(packed)].to(dtype)


def _grouped(flat: Tensor) -> Tensor:
    """(groups, 128); the last group may be short, and is filled up with zeros."""
    short = -len(flat) % GROUP
    return (F.pad(flat, (0, short)) if short else flat).view(-1, GROUP)


def groups(elements: int) -> int:
    """How many scales so many numbers need; the last group may be short."""
    return -(-elements // GROUP)


def _blocks(*tensors: Tensor) -> Iterator[list[Tensor]]:
    """The same slices of some contiguous tensors of one shape."""
    flat = [tensor.view(-1) for tensor in tensors]
    return ([tensor[at : at + BLOCK] for tensor in flat] for at in range(0, flat[0].numel(), BLOCK))
