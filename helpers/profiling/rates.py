"""How much faster this machine's CPU trains in bf16 than in fp32, which no profile shows."""

import functools
import time
from typing import Any

import torch
import torch.nn.functional as F

SIZES = (96, 384, 1024)  # of the products
CONVOLUTION = "convolution"
REPEATS = 5
EMULATED = 0.1  # below that the processor has no such instructions, and large products take minutes


@functools.cache
def bf16_speedup(kind: int | str = 384) -> float:
    """A linear layer's or a convolution's time in fp32, forward and backward, as a multiple of that under autocast.

    The conversions that autocast adds count, too: for small products they cost more than bf16 saves. By the fastest of
    a few.
    """
    return _fastest_s(torch.float32, kind) / _fastest_s(torch.bfloat16, kind)


def bf16_speedups() -> dict[str, float]:
    """Those of linear layers by size, and of a convolution; takes a second, once."""
    small = bf16_speedup(SIZES[0])
    if small < EMULATED:
        return {str(SIZES[0]): small}
    return {str(kind): round(bf16_speedup(kind), 3) for kind in (*SIZES, CONVOLUTION)}


def _fastest_s(dtype: torch.dtype, kind: int | str) -> float:
    # Constants: random numbers would change what a script draws afterwards.
    times = []
    shapes: Any = ((8, 64, 28, 28), (64, 64, 3, 3)) if kind == CONVOLUTION else ((kind, kind), (kind, kind))
    apply = functools.partial(F.conv2d, padding=1) if kind == CONVOLUTION else F.linear
    with torch.inference_mode(False), torch.enable_grad():
        x, weight = (torch.full(shape, 0.5, device="cpu", requires_grad=True) for shape in shapes)
        for _ in range(REPEATS):
            began = time.perf_counter()
            with torch.autocast("cpu", torch.bfloat16, enabled=dtype == torch.bfloat16):
                y = apply(x, weight)
            torch.autograd.grad(y, (x, weight), torch.ones_like(y))
            times.append(time.perf_counter() - began)
    return min(times)
