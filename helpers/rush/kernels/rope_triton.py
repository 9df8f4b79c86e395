"""Rotary position embedding of q and k as one Triton kernel: each element is read once and written once.

A program turns all heads of one token. It costs 2b bytes an element of q and k (b = bytes an element). The cosines and
sines of a position are read once for each sequence, 4 · head_dim bytes in fp32, mostly from the cache.
"""

import triton
import triton.language as tl
from torch import Tensor

from .where import launch


def rotate(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, q_out: Tensor, k_out: Tensor, inverse: bool) -> None:
    """Write q and k, turned, to `q_out` and `k_out`, others or the same. All are (batch, token, heads, head_dim)."""
    batch, tokens, heads, width = q.shape
    block = triton.next_power_of_2(width // 2)
    blocks = [triton.next_power_of_2(t.shape[2]) for t in (q, k)]
    launch(
        _rotate,
        batch * tokens,
        q, k, cos, sin, q_out, k_out, tokens,
        *q.stride()[:3], *k.stride()[:3], *q_out.stride()[:3], *k_out.stride()[:3],
        *(cos.stride() if cos.dim() == 3 else (0, cos.stride(0)))[:2],
        HEADS_Q=heads, HEADS_K=k.shape[2], HALF=width // 2, INVERSE=inverse,
        BLOCK_Q=blocks[0], BLOCK_K=blocks[1], BLOCK=block,
        num_warps=max(1, min(8, blocks[0] * block // 1024)),
    )  # fmt: skip


@triton.jit
def _rotate(
    q_at, k_at, cos_at, sin_at, q_out_at, k_out_at, tokens,
    q_batch, q_token, q_head, k_batch, k_token, k_head,
    q_out_batch, q_out_token, q_out_head, k_out_batch, k_out_token, k_out_head,
    cos_batch, cos_token,
    HEADS_Q: tl.constexpr, HEADS_K: tl.constexpr, HALF: tl.constexpr, INVERSE: tl.constexpr,
    BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    batch, token = (tl.program_id(0) // tokens).to(tl.int64), (tl.program_id(0) % tokens).to(tl.int64)
    pair = tl.arange(0, BLOCK)
    at = batch * cos_batch + token * cos_token + pair
    cos = tl.load(cos_at + at, mask=pair < HALF, other=0.0).to(tl.float32)[None, :]
    sin = tl.load(sin_at + at, mask=pair < HALF, other=0.0).to(tl.float32)[None, :]
    if INVERSE:
        sin = -sin
    _turn(
        q_at + batch * q_batch + token * q_token, q_head,
        q_out_at + batch * q_out_batch + token * q_out_token, q_out_head, cos, sin, HEADS_Q, HALF, BLOCK_Q, BLOCK,
    )  # fmt: skip
    _turn(
        k_at + batch * k_batch + token * k_token, k_head,
        k_out_at + batch * k_out_batch + token * k_out_token, k_out_head, cos, sin, HEADS_K, HALF, BLOCK_K, BLOCK,
    )  # fmt: skip


@triton.jit
def _turn(
    from_at, from_head, to_at, to_head, cos, sin,
    HEADS: tl.constexpr, HALF: tl.constexpr, BLOCK_HEADS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    head, pair = tl.arange(0, BLOCK_HEADS)[:, None], tl.arange(0, BLOCK)[None, :]
    inside = (head < HEADS) & (pair < HALF)
    at = from_at + head * from_head + pair
    left = tl.load(at, mask=inside, other=0.0).to(tl.float32)
    right = tl.load(at + HALF, mask=inside, other=0.0).to(tl.float32)
    at = to_at + head * to_head + pair
    tl.store(at, (left * cos - right * sin).to(to_at.dtype.element_ty), mask=inside)
    tl.store(at + HALF, (right * cos + left * sin).to(to_at.dtype.element_ty), mask=inside)
