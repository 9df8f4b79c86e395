"""Rotary position embedding of queries and keys, an autograd node of one kernel forward and one backward.

Channels i and i + D/2 of a head are rotated by an angle that depends on the position and i; the gradient is rotated
back by the same angle, so only the cosines and sines are saved for backward.

A program of the Triton kernel rotates all heads of one token. It moves 2b bytes an element of q and k (b = bytes an
element). The cosines and sines of a position are read once for each sequence, 4 · head_dim bytes in fp32, mostly from
the cache.
"""

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from .launch import launch, on_triton, tl, triton


def rotate(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """q and k, each (batch, token, heads, head_dim), rotated by position; their numbers of heads may differ.

    `cos` and `sin` are (token, head_dim/2), or (batch, token, head_dim/2) for positions that restart in each document.
    """
    _check(q, k, cos, sin)
    return _Rope.apply(q, k, cos, sin)


class _Rope(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(cos, sin)
        run = rotated_opaque if torch.compiler.is_compiling() else _rotated
        return tuple(run(q, k, cos, sin, False))

    @staticmethod
    @once_differentiable
    def backward(ctx, dq: Tensor, dk: Tensor) -> tuple[Tensor | None, ...]:
        run = rotated_opaque if torch.compiler.is_compiling() else _rotated
        return *run(dq, dk, *ctx.saved_tensors, True), None, None


def _rotated(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, inverse: bool) -> list[Tensor]:
    """The rotated q and k as new contiguous tensors; `inverse` rotates back."""
    if on_triton(q, k, cos, sin):
        return _rotated_on_triton(*(t if t.stride(-1) == 1 else t.contiguous() for t in (q, k, cos, sin)), inverse)
    cos, sin = cos.unsqueeze(-2), (-sin if inverse else sin).unsqueeze(-2)  # (…, token, 1, head_dim/2)
    rotated = []
    for x in (q, k):
        left, right = x.chunk(2, dim=-1)
        halves = torch.cat((left * cos - right * sin, right * cos + left * sin), dim=-1)
        rotated.append(halves.to(x.dtype).contiguous())
    return rotated


# An opaque operator for compiled graphs; the fake version gives the compiler the results' shapes.
rotated_opaque = torch.library.custom_op("helpers_rush::rope", _rotated, mutates_args=())


@rotated_opaque.register_fake
def _(q, k, cos, sin, inverse):
    return [q.new_empty(q.shape), k.new_empty(k.shape)]


def _check(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> None:
    if q.dim() != 4 or q.shape[-1] % 2:
        raise ValueError(f"q must have four dimensions, the last one even, not shape {tuple(q.shape)}")
    batch, tokens, _, width = q.shape
    if k.dim() != 4 or (*k.shape[:2], k.shape[3]) != (batch, tokens, width) or q.dtype != k.dtype:
        raise ValueError(
            f"k must be like q but for its heads: {q.dtype} {tuple(q.shape)}, not {k.dtype} {tuple(k.shape)}"
        )
    angles = (tokens, width // 2)
    for name, table in (("cos", cos), ("sin", sin)):
        if table.shape not in (angles, (batch, *angles)):
            raise ValueError(f"{name} must have shape {angles}, with or without the batch, not {tuple(table.shape)}")
    if cos.stride() != sin.stride() or cos.shape != sin.shape:
        raise ValueError("cos and sin must be laid out alike")


def _rotated_on_triton(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, inverse: bool) -> list[Tensor]:
    batch, tokens, heads, width = q.shape
    q_out, k_out = rotated = [torch.empty(t.shape, dtype=t.dtype, device=t.device) for t in (q, k)]
    block = triton.next_power_of_2(width // 2)
    blocks = [triton.next_power_of_2(t.shape[2]) for t in (q, k)]
    launch(
        _rotate_kernel, batch * tokens,
        q, k, cos, sin, q_out, k_out, tokens,
        *q.stride()[:3], *k.stride()[:3], *q_out.stride()[:3], *k_out.stride()[:3],
        *(cos.stride() if cos.dim() == 3 else (0, cos.stride(0)))[:2],
        HEADS_Q=heads, HEADS_K=k.shape[2], HALF=width // 2, INVERSE=inverse,
        BLOCK_Q=blocks[0], BLOCK_K=blocks[1], BLOCK=block,
        num_warps=max(1, min(8, blocks[0] * block // 1024)),
    )  # fmt: skip
    return rotated


if triton is not None:

    @triton.jit
    def _rotate_kernel(
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
        _rotate_heads(
            q_at + batch * q_batch + token * q_token, q_head,
            q_out_at + batch * q_out_batch + token * q_out_token, q_out_head, cos, sin, HEADS_Q, HALF, BLOCK_Q, BLOCK,
        )  # fmt: skip
        _rotate_heads(
            k_at + batch * k_batch + token * k_token, k_head,
            k_out_at + batch * k_out_batch + token * k_out_token, k_out_head, cos, sin, HEADS_K, HALF, BLOCK_K, BLOCK,
        )  # fmt: skip

    @triton.jit
    def _rotate_heads(
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
