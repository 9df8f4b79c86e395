"""Causal attention as matrix products on blocks of queries: q, k, v (B, heads, T, D) to the output (B, heads, T, D).

torch's flash kernel for CPUs multiplies bf16 at a small share of the product rate where a CPU has no AMX. Here a block
of 64 queries is multiplied with all keys up to its last, for all heads at once, by the library that also computes the
linear layers. The upper triangle is skipped but for the blocks on the diagonal. As in FlashAttention, only q, k and v
are saved and backward computes the scores again: 7 products of T²/2 numbers a head for flash's 7. Memory: the scores of
one block of queries, B · heads · 64 · T numbers. Query heads that share keys form one product, so keys aren't repeated.
"""

import math

import torch
from torch import Tensor

from ..lab.precision import without_autocast

BLOCK = 64  # queries; the scores of a block then fit a core's second-level cache


@torch.library.custom_op("rush::blocked_attention", mutates_args=())
def blocked_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """softmax(q·kᵀ/√D)·v, causal, in the dtype of q; k and v are (B, heads / n, T, D). The softmax sums in fp32."""
    (batch, heads, length, size), kv_heads = q.shape, k.shape[1]
    out = q.new_empty(batch, length, heads, size)
    by_group = out.view(batch, length, kv_heads, -1, size).permute(0, 2, 3, 1, 4)  # (B, kv_heads, n, T, D)
    with without_autocast(q):
        q, k, v = _grouped(q, k, v)
        for begin in range(0, length, BLOCK):
            rows = slice(begin, min(begin + BLOCK, length))
            seen = _probabilities(q, k, rows) @ v[:, : rows.stop]
            by_group[:, :, :, rows] = seen.view(batch, kv_heads, -1, rows.stop - begin, size)
    return out.transpose(1, 2)


@torch.library.custom_op("rush::blocked_attention_backward", mutates_args=())
def _backward(gradient: Tensor, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    shapes, length, dtype, scale = (q.shape, k.shape, v.shape), q.shape[2], q.dtype, q.shape[3] ** -0.5
    with without_autocast(q):
        q, k, v = _grouped(q, k, v)
        gradient = gradient.reshape(q.shape)
        grad_q = torch.empty_like(q)
        grad_k, grad_v = (torch.zeros_like(k, dtype=torch.float32) for _ in range(2))
        for begin in range(0, length, BLOCK):
            rows = slice(begin, min(begin + BLOCK, length))
            stop = rows.stop
            seen, part = _probabilities(q, k, rows), gradient[:, :, rows].flatten(1, 2)  # (G, n·b, stop), (G, n·b, D)
            grad_v[:, :stop] += seen.mT @ part
            scores = torch._softmax_backward_data(part @ v[:, :stop].mT, seen, -1, dtype)
            grad_q[:, :, rows] = (scores @ k[:, :stop]).view(len(q), -1, stop - begin, q.shape[-1])
            grad_k[:, :stop] += scores.mT @ q[:, :, rows].flatten(1, 2)
    grads = grad_q.mul_(scale), grad_k.to(dtype), grad_v.to(dtype)
    return tuple(grad.view(shape) for grad, shape in zip(grads, shapes, strict=True))


def _grouped(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """q, scaled, as (B · kv_heads, n, T, D); k and v as (B · kv_heads, T, D)."""
    length, size = q.shape[2:]
    groups = q.shape[1] // k.shape[1]
    k, v = (x.contiguous().view(-1, length, size) for x in (k, v))
    return (q * size**-0.5).contiguous().view(-1, groups, length, size), k, v


def _probabilities(q: Tensor, k: Tensor, rows: slice) -> Tensor:
    """The softmax of a block's scores, (G, n · b, rows.stop)."""
    scores = q[:, :, rows].flatten(1, 2) @ k[:, : rows.stop].mT
    count = rows.stop - rows.start
    hidden = torch.full((count, count), -math.inf, dtype=scores.dtype, device=scores.device).triu(1)
    scores.view(len(q), -1, count, rows.stop)[..., rows] += hidden
    return scores.softmax(-1)


@blocked_attention.register_fake
def _(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return torch.empty_like(q.transpose(1, 2), memory_format=torch.contiguous_format).transpose(1, 2)


@_backward.register_fake
def _(gradient: Tensor, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    return tuple(torch.empty_like(x, memory_format=torch.contiguous_format) for x in (q, k, v))


blocked_attention.register_autograd(
    lambda ctx, gradient: _backward(gradient, *ctx.saved_tensors),
    setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs),
)
