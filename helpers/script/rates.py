"""How much faster this machine's CPU trains in bf16 than in fp32, and the like, which no profile shows."""

import functools
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ..lab import machine

SIZES = (96, 384, 1024)  # of the products
LENGTHS, HEADS = (128, 512, 1056), 8  # of sequences that attend; glibc maps the last one's weights anew each time
CONVOLUTION, ATTENTION, FP64, TFLOPS = "convolution", "attention", "fp64", "fp32 TFLOP/s"
FUSED = functools.partial(F.scaled_dot_product_attention, is_causal=True)
REPEATS = 5


@functools.cache
def speedups() -> dict[str, float]:
    """Of bf16 by a linear layer's size and for a convolution; of fp32 over fp64; of fused attention by weights' bytes.

    And what a large layer reaches in fp32. Forward and backward; the conversions that autocast adds count, too: for
    small products they cost more than bf16 saves. By the fastest of a few. Takes two seconds, once. Where no unit
    multiplies bf16 numbers, one size is enough.
    """
    found = {TFLOPS: 6 * SIZES[-1] ** 3 / _layer_s(torch.float32, SIZES[-1]) / 1e12}
    found |= {FP64: _layer_s(torch.float64, 384) / _layer_s(torch.float32, 384)}
    for length in LENGTHS:
        ours, fused = (_fastest_s(way, [(1, HEADS, length, 32)] * 3) for way in (_attention, FUSED))
        found[f"{ATTENTION} {4 * HEADS * length**2}"] = ours / fused
    for kind in (*SIZES, CONVOLUTION) if machine.multiplies_half() else SIZES[1:2]:
        found[str(kind)] = _layer_s(torch.float32, kind) / _layer_s(torch.bfloat16, kind)
    return {kind: round(speedup, 3) for kind, speedup in found.items()}


def _layer_s(dtype: torch.dtype, kind: int | str) -> float:
    shapes: Any = [(8, 64, 28, 28), (64, 64, 3, 3)] if kind == CONVOLUTION else [(kind, kind), (kind, kind)]
    apply = functools.partial(F.conv2d, padding=1) if kind == CONVOLUTION else F.linear
    if dtype == torch.bfloat16:
        return _fastest_s(torch.autocast("cpu", dtype)(apply), shapes)
    return _fastest_s(apply, shapes, dtype)


def _attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    weights = (q @ k.transpose(-2, -1) * q.shape[-1] ** -0.5).masked_fill(_mask(q.shape[-2]), float("-inf"))
    return weights.softmax(-1) @ v


@functools.cache
def _mask(length: int) -> Tensor:
    return torch.ones(length, length, dtype=torch.bool, device="cpu").triu(1)


def _fastest_s(apply: Callable[..., Tensor], shapes: Any, dtype: torch.dtype = torch.float32) -> float:
    """Forward and backward. Inputs are constants: random numbers would change what a script draws afterwards."""
    times = []
    with torch.inference_mode(False), torch.enable_grad():
        inputs = [torch.full(shape, 0.5, device="cpu", dtype=dtype, requires_grad=True) for shape in shapes]
        for _ in range(REPEATS):
            began = time.perf_counter()
            y = apply(*inputs)
            torch.autograd.grad(y, inputs, torch.ones_like(y))
            times.append(time.perf_counter() - began)
    return min(times)
