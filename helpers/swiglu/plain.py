"""The elementwise parts of SwiGLU in plain torch: what runs where there is no Triton, and what Triton must equal.

With g = xW and u = xV the layer is z = SiLU(g) ⊙ u. Half precision is computed in fp32 and rounded once, as
the kernels in `triton_kernels` do. Nothing is overwritten here; temporaries cost a few tensors of g's size.
"""

import torch
from torch import Tensor

from .packing import pack, unpack


def activate(g: Tensor, u: Tensor, overwrite: bool = False) -> Tensor:
    """z = SiLU(g) ⊙ u. A kernel may `overwrite` g with it."""
    return (_silu(_wide(g)) * _wide(u)).to(g.dtype)


def activate_keeping(g: Tensor, u: Tensor) -> tuple[Tensor, Tensor]:
    """SiLU(g), rounded to g's dtype as it is kept, and z."""
    s = _silu(_wide(g)).to(g.dtype)
    return s, (_wide(s) * _wide(u)).to(g.dtype)


def activate_packing(g: Tensor, u: Tensor, overwrite: bool = False) -> tuple[Tensor, list[Tensor]]:
    """z, and g and u in 8 bits. A kernel may `overwrite` g with z."""
    packed_g, scale_g = pack(g)
    packed_u, scale_u = pack(u)
    return activate(g, u), [packed_g, packed_u, scale_g, scale_u]


def differentiate(dz: Tensor, g: Tensor, u: Tensor, overwrite: bool = False) -> tuple[Tensor, Tensor, Tensor]:
    """∂L/∂g, ∂L/∂u and z from ∂L/∂z. A kernel overwrites dz with z, and g and u too if `overwrite`."""
    wide_dz, wide_g, wide_u = _wide(dz), _wide(g), _wide(u)
    sigma = torch.sigmoid(wide_g)
    silu = wide_g * sigma
    dg = wide_dz * wide_u * sigma * (1 + wide_g * (1 - sigma))
    du = wide_dz * silu
    return dg.to(g.dtype), du.to(g.dtype), (silu * wide_u).to(g.dtype)


def differentiate_kept(
    dz: Tensor, g: Tensor, s: Tensor, u: Tensor, overwrite: bool = False
) -> tuple[Tensor, Tensor, Tensor]:
    """The same with s = SiLU(g) kept, which saves next to nothing: σ(g) is needed all the same."""
    wide_dz, wide_g, wide_s, wide_u = _wide(dz), _wide(g), _wide(s), _wide(u)
    sigma = torch.sigmoid(wide_g)
    dg = wide_dz * wide_u * sigma * (1 + wide_g * (1 - sigma))
    du = wide_dz * wide_s
    return dg.to(g.dtype), du.to(g.dtype), (wide_s * wide_u).to(g.dtype)


def differentiate_packed(dz: Tensor, kept: list[Tensor]) -> tuple[Tensor, Tensor, Tensor]:
    """The same from g and u in 8 bits. A kernel overwrites dz with z."""
    packed_g, packed_u, scale_g, scale_u = kept
    return differentiate(dz, unpack(packed_g, scale_g, dz.dtype), unpack(packed_u, scale_u, dz.dtype))


def _silu(g: Tensor) -> Tensor:
    return g * torch.sigmoid(g)


def _wide(tensor: Tensor) -> Tensor:
    """fp32 for half precision; fp32 and fp64 as they are."""
    return tensor.float() if tensor.dtype in (torch.float16, torch.bfloat16) else tensor
