"""Linear layers whose three matrix products run in float8, with per-tensor scales computed at every call.

Activations and weights are rounded to e4m3 (3 mantissa bits, up to 448), gradients to e5m2 (2 bits, up to 57344).
The scale maps a tensor's largest magnitude to the largest number of its dtype. A product is up to twice as fast as in
bf16. The cost is one pass over each input for its largest magnitude and another to round it: it pays from widths of a
few thousand on, and only where the compiler fuses those passes with the operation that produced the input.

The tensor cores need both factors contiguous along the dimension that is summed over, so backward copies the rounded
tensors into the other layout.
"""

import torch
from torch import Tensor, nn

ALIGNED = 16  # `torch._scaled_mm` needs dimensions that are multiples of it
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2

Rounded = tuple[Tensor, Tensor]  # a float8 tensor and its scale: the product is the original tensor


class Float8Linear(nn.Linear):
    """nn.Linear without a bias, its products in float8, its output in bf16. The weight keeps its dtype."""

    def forward(self, x: Tensor) -> Tensor:
        rows = x.reshape(-1, x.shape[-1]).to(torch.bfloat16)  # (T, in)
        return _Products.apply(rows, self.weight).unflatten(0, x.shape[:-1])


class _Products(torch.autograd.Function):
    """y = x Wᵀ. x, W and ∂L/∂y are rounded once each; x and W are saved in float8, a byte an element."""

    @staticmethod
    def forward(ctx, x: Tensor, weight: Tensor) -> Tensor:
        rounded_x, rounded_weight = rounded(x, E4M3), rounded(weight, E4M3)
        ctx.save_for_backward(*rounded_x, *rounded_weight)
        ctx.weight_dtype = weight.dtype
        return multiply(rounded_x, transposed(rounded_weight), fast=True)

    @staticmethod
    def backward(ctx, upstream: Tensor) -> tuple[Tensor, Tensor]:
        codes_x, scale_x, codes_weight, scale_weight = ctx.saved_tensors
        rounded_upstream = rounded(upstream.to(torch.bfloat16), E5M2)  # (T, out)
        grad_x = multiply(rounded_upstream, (codes_weight, scale_weight))  # (T, in)
        grad_weight = multiply(transposed(rounded_upstream), (codes_x, scale_x))  # (out, in)
        return grad_x, grad_weight.to(ctx.weight_dtype)


def multiply(left: Rounded, right: Rounded, *, fast: bool = False) -> Tensor:
    """left (M, K) @ right (K, N) in bf16. Copies a factor that isn't contiguous along K.

    `fast` accumulates with fewer bits, which is accurate enough for outputs but not for gradients.
    """
    a, b = left[0].contiguous(), right[0].T.contiguous().T  # row-major, column-major, as `torch._scaled_mm` needs
    return torch._scaled_mm(a, b, scale_a=left[1], scale_b=right[1], out_dtype=torch.bfloat16, use_fast_accum=fast)


def transposed(x: Rounded) -> Rounded:
    return x[0].T, x[1]


def rounded(x: Tensor, dtype: torch.dtype) -> Rounded:
    """x / scale in a float8 dtype, and the scale, which maps the largest magnitude to the dtype's largest number."""
    largest = torch.finfo(dtype).max
    scale = x.abs().amax().float().clamp(min=1e-12) / largest
    return (x.float() / scale).clamp(-largest, largest).to(dtype), scale


def convert(model: nn.Module) -> None:
    """Turn a model's bias-free `nn.Linear`s into `Float8Linear`s, in place; their parameters stay the same.

    Layers whose sizes aren't multiples of 16 are left alone.
    """
    for module in model.modules():
        fits = type(module) is nn.Linear and module.bias is None
        if fits and not (module.in_features % ALIGNED or module.out_features % ALIGNED):
            module.__class__ = Float8Linear
