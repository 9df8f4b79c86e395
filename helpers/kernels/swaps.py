"""LayerNorm and RMSNorm in six variants, to compare, and to swap into any model.

    swap_norms(model, to="triton")    # every nn.LayerNorm and nn.RMSNorm of the model; `to="torch"` undoes it

`least_bytes` is the lower bound on the bytes that a norm moves, forward and backward.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from helpers.lab import device
from helpers.lab.arguments import check_choice
from helpers.lab.compiling import compiled_apart
from helpers.lab.machine import missing_because

from .norms import layer_norm, rms_norm

KINDS = ("layer", "rms")
WRITTEN_OUT, COMPILED, TORCH, OURS = "torch operations", "torch.compile", "torch", "triton"
APEX, LIGER = "apex", "liger"
VARIANTS = (WRITTEN_OUT, COMPILED, TORCH, OURS, APEX, LIGER)
SWAPS = (TORCH, OURS, APEX, LIGER)
NEEDS = {OURS: ("triton", "CUDA"), APEX: ("apex", "CUDA"), LIGER: ("liger-kernel", "CUDA")}

# (x, weight, bias, eps) -> y; weight and bias may be None, and for RMSNorm eps too; RMSNorm has no bias
Norm = Callable[[Tensor, Tensor | None, Tensor | None, float | None], Tensor]


class LayerNorm(nn.LayerNorm):
    """`nn.LayerNorm` over the last dimension, computed by the variant that `swap_norms` set (default: our kernels).

    Under autocast the output has autocast's dtype. `nn.LayerNorm` returns fp32, twice the bytes, which the next matrix
    product copies to half precision.
    """

    variant = OURS

    def forward(self, x: Tensor) -> Tensor:
        return NORMS["layer"][self.variant](x, self.weight, self.bias, self.eps)


class RMSNorm(nn.RMSNorm):
    """`nn.RMSNorm` over the last dimension, computed by the variant that `swap_norms` set (default: our kernels)."""

    variant = OURS

    def forward(self, x: Tensor) -> Tensor:
        return NORMS["rms"][self.variant](x, self.weight, None, self.eps)


def swap_norms(model: nn.Module, to: str = OURS) -> int:
    """Make every LayerNorm and RMSNorm of a model use a variant of `SWAPS`; returns how many norms were changed.

    Only the modules' class changes; parameters, names and hooks stay, so optimizers and checkpoints keep working.
    Norms over more than the last dimension, and subclasses of torch's norms, are left alone.
    """
    check_choice(SWAPS, to=to)
    if to in (APEX, LIGER) and (reason := missing_because(*NEEDS[to][:1])):
        raise ValueError(f"to is {to!r}; {reason}")
    replacements = {nn.LayerNorm: LayerNorm, nn.RMSNorm: RMSNorm}
    originals = {replacement: original for original, replacement in replacements.items()}
    count = 0
    for module in model.modules():
        original = originals.get(type(module), type(module))
        if original not in replacements or len(module.normalized_shape) != 1:
            continue
        count += 1
        module.__dict__.pop("variant", None)
        module.__class__ = original if to == TORCH else replacements[original]
        if to not in (TORCH, OURS):
            module.variant = to
    return count


def norm(variant: str, kind: str, eps: float = 1e-5) -> Callable[[Tensor, Tensor | None, Tensor | None], Tensor]:
    """The norm of a kind in a variant, as a function of x, weight and bias; `needs` lists its requirements."""
    check_choice(KINDS, kind=kind)
    check_choice(VARIANTS, variant=variant)
    plain = NORMS[kind][WRITTEN_OUT]
    compute = compiled_apart(plain, dynamic=False) if variant == COMPILED else NORMS[kind][variant]

    def normalise(x: Tensor, weight: Tensor | None = None, bias: Tensor | None = None) -> Tensor:
        return compute(x, weight, bias, eps)

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


def _written_out_layer(x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float) -> Tensor:
    wide = x.float()
    wide = wide - wide.mean(-1, keepdim=True)
    wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    wide = wide if weight is None else wide * weight
    return (wide if bias is None else wide + bias).to(x.dtype)


def _written_out_rms(x: Tensor, weight: Tensor | None, bias: None, eps: float | None) -> Tensor:
    wide = x.float()
    wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + _given(eps))
    return (wide if weight is None else wide * weight).to(x.dtype)


def _apex_layer(x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float) -> Tensor:
    from apex.normalization import fused_layer_norm as apex

    shape = x.shape[-1:]
    if weight is None:
        return apex.fused_layer_norm(x, shape, eps)
    bias = torch.zeros_like(weight) if bias is None else bias
    return apex.fused_layer_norm_affine(x, weight, bias, shape, eps)


def _apex_rms(x: Tensor, weight: Tensor | None, bias: None, eps: float | None) -> Tensor:
    from apex.normalization import fused_layer_norm as apex

    if weight is None:
        return apex.fused_rms_norm(x, x.shape[-1:], _given(eps))
    return apex.fused_rms_norm_affine(x, weight, x.shape[-1:], _given(eps))


def _liger_layer(x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float) -> Tensor:
    from liger_kernel.ops.layer_norm import LigerLayerNormFunction

    weight = x.new_ones(x.shape[-1]) if weight is None else weight
    return LigerLayerNormFunction.apply(x, weight, torch.zeros_like(weight) if bias is None else bias, eps)


def _liger_rms(x: Tensor, weight: Tensor | None, bias: None, eps: float | None) -> Tensor:
    from liger_kernel.ops.rms_norm import LigerRMSNormFunction

    weight = x.new_ones(x.shape[-1]) if weight is None else weight
    # offset 0; casting mode "gemma": cast after the weight, as torch does; not in place, so the gradient is unchanged
    return LigerRMSNormFunction.apply(x, weight, _given(eps), 0.0, "gemma", False)


NORMS: dict[str, dict[str, Norm]] = {
    "layer": {
        WRITTEN_OUT: _written_out_layer,
        TORCH: lambda x, weight, bias, eps: F.layer_norm(x, x.shape[-1:], weight, bias, eps),
        OURS: layer_norm,
        APEX: _apex_layer,
        LIGER: _liger_layer,
    },
    "rms": {
        WRITTEN_OUT: _written_out_rms,
        TORCH: lambda x, weight, bias, eps: F.rms_norm(x, x.shape[-1:], weight, eps),
        OURS: lambda x, weight, bias, eps: rms_norm(x, weight, eps),
        APEX: _apex_rms,
        LIGER: _liger_rms,
    },
}


def _given(eps: float | None) -> float:
    """`eps`, or by default torch's RMSNorm epsilon for computation in fp32."""
    return torch.finfo(torch.float32).eps if eps is None else eps
