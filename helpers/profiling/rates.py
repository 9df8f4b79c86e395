"""How much faster this machine's CPU multiplies bf16 than fp32 numbers, which no profile shows."""

import functools
import time

import torch

SIZE = 384  # of the products: about a millisecond each
REPEATS = 7


@functools.cache
def bf16_speedup() -> float:
    """The rate of a product in bf16 as a multiple of that in fp32, by the fastest of a few; takes 20 ms, once."""
    return _fastest_s(torch.float32) / _fastest_s(torch.bfloat16)


def _fastest_s(dtype: torch.dtype) -> float:
    # Constants: random numbers would change what a script draws afterwards.
    left, right = (torch.full((SIZE, SIZE), 0.5, dtype=dtype) for _ in range(2))
    out, times = torch.empty_like(left), []
    with torch.no_grad(), torch.autocast("cpu", enabled=False):
        for _ in range(REPEATS):
            began = time.perf_counter()
            torch.mm(left, right, out=out)
            times.append(time.perf_counter() - began)
    return min(times)
