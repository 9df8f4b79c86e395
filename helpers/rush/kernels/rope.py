"""Rotary position embedding of queries and keys, an autograd node of one kernel forward and one backward.

Channels i and i + D/2 of a head are turned by the angle of their position and i; the gradient is turned back by the
same angle, so nothing is kept for backward but the cosines and sines.
"""

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from .where import on_triton


def rotate(
    q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, *, heads_first: bool = False, overwrite: bool = False
) -> tuple[Tensor, Tensor]:
    """q and k, each (batch, token, heads, head_dim), with their positions turned in; the numbers of heads may differ.

    `heads_first`: they are (batch, heads, token, head_dim). `cos` and `sin` are (token, head_dim/2), or with the batch
    before, for positions that start anew in each document.

    `overwrite` turns them where they lie: no memory is allocated, and q and k must not be used again. What still needs
    their old values for its own backward fails there, as after any operation in place. It is ignored where it can't be:
    in a compiled graph, for a leaf that learns, and for expanded tensors.
    """
    _check(q, k, cos, sin, heads_first)
    return _Rope.apply(q, k, cos, sin, heads_first, overwrite)


class _Rope(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, heads_first: bool, overwrite: bool
    ) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(cos, sin)
        ctx.heads_first = heads_first
        if torch.compiler.is_compiling():
            return tuple(turned_opaque(q, k, cos, sin, heads_first, False))
        if not (overwrite and _writable(q) and _writable(k)):
            return tuple(_turned(q, k, cos, sin, heads_first, False))
        _turn_into(q, k, cos, sin, q, k, heads_first, False)
        torch.autograd.graph.increment_version([q, k])
        return q.view_as(q), k.view_as(k)

    @staticmethod
    @once_differentiable
    def backward(ctx, dq: Tensor, dk: Tensor) -> tuple[Tensor | None, ...]:
        run = turned_opaque if torch.compiler.is_compiling() else _turned
        return *run(dq, dk, *ctx.saved_tensors, ctx.heads_first, True), None, None, None, None


def _turned(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, heads_first: bool, inverse: bool) -> list[Tensor]:
    """The turned q and k as new tensors, contiguous."""
    turned = [torch.empty(t.shape, dtype=t.dtype, device=t.device) for t in (q, k)]
    _turn_into(q, k, cos, sin, *turned, heads_first, inverse)
    return turned


turned_opaque = torch.library.custom_op("helpers_rush::rope", _turned, mutates_args=())


@turned_opaque.register_fake
def _(q, k, cos, sin, heads_first, inverse):
    return [q.new_empty(q.shape), k.new_empty(k.shape)]


def _turn_into(
    q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, q_out: Tensor, k_out: Tensor, heads_first: bool, inverse: bool
) -> None:
    q, k, q_out, k_out = (t.transpose(1, 2) if heads_first else t for t in (q, k, q_out, k_out))
    if on_triton(q, k, cos, sin):
        from . import rope_triton

        whole = [t if t.stride(-1) == 1 else t.contiguous() for t in (q, k, cos, sin)]
        return rope_triton.rotate(*whole, q_out, k_out, inverse)
    cos, sin = cos.unsqueeze(-2), (-sin if inverse else sin).unsqueeze(-2)
    for x, out in ((q, q_out), (k, k_out)):
        left, right = x.chunk(2, dim=-1)
        turned = torch.cat((left * cos - right * sin, right * cos + left * sin), dim=-1)
        out.copy_(turned)
    return None


def _writable(tensor: Tensor) -> bool:
    """Whether the tensor's memory may be written over, each element being there once."""
    leaf = tensor.is_leaf and tensor.requires_grad
    return not leaf and tensor.stride(-1) == 1 and 0 not in tensor.stride()


def _check(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, heads_first: bool) -> None:
    if q.dim() != 4 or q.shape[-1] % 2:
        raise ValueError(f"q must have four dimensions, the last one even, not shape {tuple(q.shape)}")
    heads = 1 if heads_first else 2
    rest = [[n for i, n in enumerate(t.shape) if i != heads] for t in (q, k)]
    if rest[0] != rest[1] or q.dtype != k.dtype:
        raise ValueError(
            f"k must be like q but for its heads: {q.dtype} {tuple(q.shape)}, not {k.dtype} {tuple(k.shape)}"
        )
    angles = (rest[0][1], q.shape[-1] // 2)
    for name, table in (("cos", cos), ("sin", sin)):
        if table.shape not in (angles, (q.shape[0], *angles)):
            raise ValueError(f"{name} must have shape {angles}, with or without the batch, not {tuple(table.shape)}")
    if cos.stride() != sin.stride() or cos.shape != sin.shape:
        raise ValueError("cos and sin must be laid out alike")
