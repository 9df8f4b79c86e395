"""Cross-entropy that keeps nothing but the logits, and leaves their gradient in their place.

At a large vocabulary the logits are the largest tensor of a training step: 16 GiB at 32,768 tokens and 128,256 words
in fp32. Here neither their log-softmax nor their gradient is a second one. The price is that the logits are gone once
the loss is there, that backward can run once, and that the gradient is rounded to the logits' type before it is
multiplied by ∂L/∂loss. Where that is not 1 (gradient accumulation, loss scaling) this takes a pass of its own.
"""

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from .where import on_triton

IGNORED = -100
INTEGERS = (torch.int32, torch.int64)


def cross_entropy(logits: Tensor, target: Tensor, ignore_index: int = IGNORED) -> Tensor:
    """The mean loss, in fp32, of logits (…, V) for the targets (…) that aren't `ignore_index`.

    If a gradient is wanted it is computed here, and **written over the logits**: don't use them again. What needs them
    for its own backward fails there, as after any operation in place. In a compiled graph it is torch's, in fp32.
    """
    _check(logits, target)
    if torch.compiler.is_compiling():
        wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
        return F.cross_entropy(wide.flatten(0, -2), target.flatten().long(), ignore_index=ignore_index)
    learns = torch.is_grad_enabled() and logits.requires_grad
    return _CrossEntropy.apply(logits, target, ignore_index, learns)


@torch.no_grad()
def loss_and_gradient(logits: Tensor, target: Tensor, ignore_index: int = IGNORED) -> tuple[Tensor, Tensor]:
    """The loss of each row of logits (N, V), in fp32 and 0 for `ignore_index`, and the gradient of their sum.

    The gradient lies where the logits lay: the second result is the first argument. No autograd node; for layers that
    compute their gradients in forward, a chunk of tokens at a time.
    """
    _check(logits, target)
    losses = _losses_over(logits, target, None, ignore_index, True)
    torch.autograd.graph.increment_version(logits)
    return losses, logits


class _CrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx, logits: Tensor, target: Tensor, ignore_index: int, learns: bool) -> Tensor:
        rows, flat = logits.reshape(-1, logits.shape[-1]), target.reshape(-1)
        if learns and (rows.data_ptr() != logits.data_ptr() or rows.stride(1) != 1):
            rows = rows.clone(memory_format=torch.contiguous_format)  # the gradient's place, for want of a better one
        elif rows.stride(1) != 1:
            rows = rows.contiguous()
        count = (flat != ignore_index).sum().to(torch.promote_types(logits.dtype, torch.float32))
        share = 1.0 / count.clamp(min=1)
        # In fp16 a token's share of the mean may be below the smallest number, so it is multiplied in with ∂L/∂loss.
        late = logits.dtype == torch.float16
        losses = _losses_over(rows, flat, None if late else share, ignore_index, learns)
        if learns:
            torch.autograd.graph.increment_version(logits)
            ctx.gradient, ctx.shape = rows.detach(), logits.shape
            ctx.share = share if late else None
        return losses.sum() / count

    @staticmethod
    @once_differentiable
    def backward(ctx, upstream: Tensor) -> tuple[Tensor | None, ...]:
        gradient, ctx.gradient = ctx.gradient, None
        if gradient is None:
            raise RuntimeError("cross_entropy: backward can run once, for the gradient is handed on and not kept")
        _scale(gradient, upstream if ctx.share is None else upstream * ctx.share)
        return gradient.view(ctx.shape), None, None, None


def _losses_over(
    rows: Tensor, target: Tensor, factor: Tensor | None, ignore_index: int, write_gradient: bool
) -> Tensor:
    if on_triton(rows):
        from . import cross_entropy_triton

        return cross_entropy_triton.losses_over(rows, target.contiguous(), factor, ignore_index, write_gradient)
    wide = rows.to(torch.promote_types(rows.dtype, torch.float32))
    losses = F.cross_entropy(wide, target.long(), ignore_index=ignore_index, reduction="none")
    if write_gradient:
        hit = torch.arange(wide.shape[1], device=wide.device) == target[:, None]
        counts = (target != ignore_index)[:, None]
        gradient = torch.where(counts, wide.softmax(1) - hit.to(wide.dtype), 0)
        rows.copy_(gradient if factor is None else gradient * factor)
    return losses


def _scale(gradient: Tensor, by: Tensor) -> None:
    if on_triton(gradient):
        from . import cross_entropy_triton

        cross_entropy_triton.scale(gradient, by)
    else:
        gradient.mul_(by)


def _check(logits: Tensor, target: Tensor) -> None:
    if logits.dim() < 2 or logits.shape[-1] == 0 or not logits.is_floating_point():
        raise ValueError(f"logits must be floating-point (…, V), not {logits.dtype} of shape {tuple(logits.shape)}")
    if target.shape != logits.shape[:-1] or target.dtype not in INTEGERS:
        wanted = f"int64 or int32 of shape {tuple(logits.shape[:-1])}"
        raise ValueError(f"target must be {wanted}, not {target.dtype} of shape {tuple(target.shape)}")
