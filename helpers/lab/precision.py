"""What a GPU computes fp32 products in."""

import contextlib
from collections.abc import Iterator

import torch


@contextlib.contextmanager
def fp32_products(tf32: bool = False) -> Iterator[None]:
    """Products and convolutions of fp32 numbers on a GPU keep fp32 inside, or are rounded to TF32 if that is asked for.

    torch's defaults differ: products keep fp32, convolutions don't. Both are as they were afterwards.
    """
    cudnn, before = torch.backends.cudnn, (torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32)
    torch.set_float32_matmul_precision("high" if tf32 else "highest")
    cudnn.allow_tf32 = tf32
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before[0])
        cudnn.allow_tf32 = before[1]
