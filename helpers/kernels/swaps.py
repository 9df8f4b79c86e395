"""LayerNorm and RMSNorm in six variants, to compare, and ours to swap into any model.

    swap_norms(model)    # every nn.LayerNorm and nn.RMSNorm of the model is ours; `to="torch"` undoes it

`least_bytes` is the lower bound on the bytes that a norm moves, forward and backward.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..lab import device
from ..lab.arguments import check_choice
from ..lab.compiling import compiled_apart
from ..models.llama import eager_rms_norm
from .norms import layer_norm, rms_norm

KINDS, EPS = ("layer", "rms"), 1e-5
WRITTEN_OUT, COMPILED, TORCH, OURS = "torch operations", "torch.compile", "torch", "triton"
APEX, LIGER = "apex", "liger"
VARIANTS = (WRITTEN_OUT, COMPILED, TORCH, OURS, APEX, LIGER)
NEEDS = {OURS: ("triton", "CUDA"), APEX: ("apex", "CUDA"), LIGER: ("liger-kernel", "CUDA")}

Norm = Callable[[Tensor, Tensor, Tensor | None, float], Tensor]  # (x, weight, bias, eps) -> y; RMSNorm has no bias


class LayerNorm(nn.LayerNorm):
    """`nn.LayerNorm` over the last dimension by our kernels.

    Under autocast the output has autocast's dtype. `nn.LayerNorm` returns fp32, twice the bytes, which the next matrix
    product copies to half precision.
    """

    def forward(self, x: Tensor) -> Tensor:
        return layer_norm(x, self.weight, self.bias, self.eps)


class RMSNorm(nn.RMSNorm):
    """`nn.RMSNorm` over the last dimension by our kernels."""

    def forward(self, x: Tensor) -> Tensor:
        return rms_norm(x, self.weight, self.eps)


def swap_norms(model: nn.Module, to: str = OURS) -> int:
    """Make every LayerNorm and RMSNorm of a model ours, or torch's again; returns how many there are.

    Only the modules' class changes; parameters, names and hooks stay, so optimizers and checkpoints keep working.
    Norms over more than the last dimension, and subclasses of torch's norms, are left alone.
    """
    check_choice((TORCH, OURS), to=to)
    count = 0
    for module in model.modules():
        for pair in ({TORCH: nn.LayerNorm, OURS: LayerNorm}, {TORCH: nn.RMSNorm, OURS: RMSNorm}):
            if type(module) in pair.values() and len(module.normalized_shape) == 1:
                module.__class__ = pair[to]
                count += 1
    return count


def norm(variant: str, kind: str) -> Callable[..., Tensor]:
    """The norm of a kind in a variant, as a function of x, weight and bias; `needs` lists its requirements."""
    check_choice(KINDS, kind=kind)
    check_choice(VARIANTS, variant=variant)
    plain = NORMS[kind][WRITTEN_OUT]
    compute = compiled_apart(plain, dynamic=False) if variant == COMPILED else NORMS[kind][variant]

    def normalise(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        return compute(x, weight, bias, EPS)

    return normalise


def needs(variant: str) -> tuple[str, ...]:
    """What a variant needs on this machine's device, for `lab.machine.missing_because`."""
    if variant == COMPILED:
        return ("triton",) if device().type == "cuda" else ("C++ compiler",)
    return NEEDS.get(variant, ())


def least_bytes(elements: int, itemsize: int) -> tuple[int, int]:
    """Lower bound on the bytes that a norm's forward and backward move: 2 and 3 tensors of x's size.

    Forward reads x and writes y; backward reads ∂L/∂y and x and writes ∂L/∂x. Weights and statistics are neglected.
    """
    return 2 * elements * itemsize, 3 * elements * itemsize


def _written_out_layer(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
    wide = x.float()
    wide = wide - wide.mean(-1, keepdim=True)
    return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps) * weight + bias).to(x.dtype)


def _apex_layer(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
    from apex.normalization import fused_layer_norm as apex

    return apex.fused_layer_norm_affine(x, weight, bias, x.shape[-1:], eps)


def _apex_rms(x: Tensor, weight: Tensor, bias: None, eps: float) -> Tensor:
    from apex.normalization import fused_layer_norm as apex

    return apex.fused_rms_norm_affine(x, weight, x.shape[-1:], eps)


def _liger_layer(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
    from liger_kernel.ops.layer_norm import LigerLayerNormFunction

    return LigerLayerNormFunction.apply(x, weight, bias, eps)


def _liger_rms(x: Tensor, weight: Tensor, bias: None, eps: float) -> Tensor:
    from liger_kernel.ops.rms_norm import LigerRMSNormFunction

    # offset 0; casting mode "gemma": cast after the weight, as torch does; not in place, so the gradient is unchanged
    return LigerRMSNormFunction.apply(x, weight, eps, 0.0, "gemma", False)


NORMS: dict[str, dict[str, Norm]] = {
    "layer": {
        WRITTEN_OUT: _written_out_layer,
        TORCH: lambda x, weight, bias, eps: F.layer_norm(x, x.shape[-1:], weight, bias, eps),
        OURS: layer_norm,
        APEX: _apex_layer,
        LIGER: _liger_layer,
    },
    "rms": {
        WRITTEN_OUT: lambda x, weight, bias, eps: eager_rms_norm(x, weight, eps),
        TORCH: lambda x, weight, bias, eps: F.rms_norm(x, x.shape[-1:], weight, eps),
        OURS: lambda x, weight, bias, eps: rms_norm(x, weight, eps),
        APEX: _apex_rms,
        LIGER: _liger_rms,
    },
}
