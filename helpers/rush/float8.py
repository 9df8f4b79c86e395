"""Linear layers whose three products are in float8, with one scale for each tensor, taken anew at every call.

Activations and weights are rounded to e4m3 (3 bits of mantissa, up to 448), gradients to e5m2 (2 bits, up to 57344).
The scale makes a tensor's largest magnitude the largest number of its type. A product is up to twice as fast as in
bf16; what it costs is a pass over each input for its largest magnitude and another to round it, which pays from
widths of a few thousand on, and only where the compiler fuses those passes with what made the input.

The matrix units want both factors stored along the dimension that is summed over, so backward copies what was rounded
into the other layout.
"""

import torch
from torch import Tensor, nn

ALIGNED = 16  # all dimensions of a product must be multiples of it
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2

Rounded = tuple[Tensor, Tensor]  # numbers in float8, and what to multiply them by


class Float8Linear(nn.Linear):
    """nn.Linear without a bias, its products in float8, its output in bf16. The weight stays as it is."""

    def forward(self, x: Tensor) -> Tensor:
        rows = x.reshape(-1, x.shape[-1]).to(torch.bfloat16)  # (T, in)
        return _Products.apply(rows, self.weight).unflatten(0, x.shape[:-1])


class _Products(torch.autograd.Function):
    """y = x Wᵀ. Each of x, W and ∂L/∂y is rounded once; x and W are kept as they were rounded, a byte a number."""

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
    """left (M, K) @ right (K, N) in bf16. Copies a factor whose numbers don't lie along K.

    `fast` adds up with fewer bits, which is good enough for outputs and not for gradients.
    """
    a, b = left[0].contiguous(), right[0].T.contiguous().T  # by rows, by columns
    return torch._scaled_mm(a, b, scale_a=left[1], scale_b=right[1], out_dtype=torch.bfloat16, use_fast_accum=fast)


def transposed(x: Rounded) -> Rounded:
    return x[0].T, x[1]


def rounded(x: Tensor, dtype: torch.dtype) -> Rounded:
    """x / scale in a float8 type, and the scale, which makes the largest magnitude the type's largest."""
    largest = torch.finfo(dtype).max
    scale = x.abs().amax().float().clamp(min=1e-12) / largest
    return (x.float() / scale).clamp(-largest, largest).to(dtype), scale


def convert(model: nn.Module) -> None:
    """Turn the Linears of a model without a bias into `Float8Linear`s, in place; their parameters stay the same.

    Those whose sizes are no multiples of 16 stay.
    """
    for module in model.modules():
        fits = type(module) is nn.Linear and module.bias is None
        if fits and not (module.in_features % ALIGNED or module.out_features % ALIGNED):
            module.__class__ = Float8Linear
