"""Somebody's library, as the lecture's example calls one: a function in plain torch, and one that leaves for C."""

import zlib

from torch import Tensor


def squeeze(y: Tensor) -> Tensor:
    """Into (−1, 1), by torch's operations."""
    return y / (1 + y.abs())


def packed_size(x: Tensor) -> int:
    """How many bytes zlib, a C library, packs the tensor's bytes into. No tracer of torch sees into it."""
    return len(zlib.compress(x.numpy().tobytes()))
