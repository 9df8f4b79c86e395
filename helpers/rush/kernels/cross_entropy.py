"""Cross-entropy that saves nothing but the logits, and leaves their gradient in their place.

At a large vocabulary the logits are the largest tensor of a training step: 16 GiB at 32,768 tokens and 128,256 words
in fp32. Here neither their log-softmax nor their gradient is a second one. The price is that the logits are gone once
the loss is there, that backward can run once, and that the gradient is rounded to the logits' type before it is
multiplied by ∂L/∂loss. Where that is not 1 (gradient accumulation, loss scaling) this takes a pass of its own.

A program of the Triton kernel takes one row. It walks over it once for the largest logit and the sum of exponentials
(online softmax: both are corrected when a larger one turns up), and walks back writing (softmax − one-hot) · factor.
The way back starts with what was read last, so that most of it comes from the cache. It costs 2b bytes a logit from
memory (b = bytes an element) and no memory; torch's reads or writes a logit six times and allocates three tensors of
the logits' size.
"""

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from .launch import launch, on_triton, stages, tl, triton

IGNORED = -100
# Logits at a time at most, 16 a thread: 32 warps leave room for one row on a multiprocessor, and 132 rows of a large
# vocabulary in bf16 are what the cache of an H200 holds.
BLOCK = 16384
SCALE_BLOCK = 4096
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
    """The loss of each row of (N, V) logits in fp32; the gradient of their sum · `factor` replaces the logits."""
    if on_triton(rows):
        return _losses_on_triton(rows, target.contiguous(), factor, ignore_index, write_gradient)
    wide = rows.to(torch.promote_types(rows.dtype, torch.float32))
    losses = F.cross_entropy(wide, target.long(), ignore_index=ignore_index, reduction="none")
    if write_gradient:
        hit = torch.arange(wide.shape[1], device=wide.device) == target[:, None]
        counts = (target != ignore_index)[:, None]
        gradient = torch.where(counts, wide.softmax(1) - hit.to(wide.dtype), 0)
        rows.copy_(gradient if factor is None else gradient * factor)
    return losses


def _scale(gradient: Tensor, by: Tensor) -> None:
    """Multiply (N, V) in place by a number on its device. Where it is 1, the kernel reads nothing but the number."""
    if on_triton(gradient):
        count, vocabulary = gradient.shape
        launch(_scale_kernel, count, gradient, by, gradient.stride(0), V=vocabulary, BLOCK=SCALE_BLOCK, num_warps=8)
    else:
        gradient.mul_(by)


def _check(logits: Tensor, target: Tensor) -> None:
    if logits.dim() < 2 or logits.shape[-1] == 0 or not logits.is_floating_point():
        raise ValueError(f"logits must be floating-point (…, V), not {logits.dtype} of shape {tuple(logits.shape)}")
    if target.shape != logits.shape[:-1] or target.dtype not in INTEGERS:
        wanted = f"int64 or int32 of shape {tuple(logits.shape[:-1])}"
        raise ValueError(f"target must be {wanted}, not {target.dtype} of shape {tuple(target.shape)}")


def _losses_on_triton(
    logits: Tensor, target: Tensor, factor: Tensor | None, ignore_index: int, write_gradient: bool
) -> Tensor:
    count, vocabulary = logits.shape
    losses = torch.empty(count, dtype=torch.float32, device=logits.device)
    block = min(BLOCK, triton.next_power_of_2(vocabulary))
    launch(
        _losses_kernel, count, logits, target, losses, factor, logits.stride(0), ignore_index,
        V=vocabulary, BLOCK=block, WRITE=write_gradient,
        STAGES=stages(block * logits.element_size()), num_warps=max(1, block // 512),
    )  # fmt: skip
    return losses


if triton is not None:

    @triton.jit
    def _losses_kernel(
        logits_at, target_at, losses_at, factor_at, step, ignore_index,
        V: tl.constexpr, BLOCK: tl.constexpr, WRITE: tl.constexpr, STAGES: tl.constexpr,
    ):  # fmt: skip
        row = tl.program_id(0).to(tl.int64)
        logits_at += row * step
        target = tl.load(target_at + row)
        column = tl.arange(0, BLOCK)
        if target == ignore_index:
            tl.store(losses_at + row, 0.0)
            if WRITE:
                zero = tl.zeros((BLOCK,), logits_at.dtype.element_ty)
                for first in tl.range(0, V, BLOCK):
                    tl.store(logits_at + first + column, zero, mask=first + column < V)
        else:
            largest = tl.full((), float("-inf"), tl.float32)
            sums = tl.zeros((BLOCK,), tl.float32)
            for first in tl.range(0, V, BLOCK, num_stages=STAGES):
                at = first + column
                x = tl.load(logits_at + at, mask=at < V, other=float("-inf")).to(tl.float32)
                before = largest
                largest = tl.maximum(largest, tl.max(x, axis=0))
                # A block of −∞ alone leaves the sums as they are, at zero.
                base = tl.where(largest == float("-inf"), 0.0, largest)
                sums = sums * tl.exp(before - base) + tl.exp(x - base)
            log_sum = largest + tl.log(tl.sum(sums, axis=0))
            # A target outside the vocabulary makes the loss NaN.
            inside = (target >= 0) & (target < V)
            loss = log_sum - tl.load(logits_at + target, mask=inside, other=float("nan")).to(tl.float32)
            tl.store(losses_at + row, loss)
            if WRITE:
                tl.debug_barrier()  # the target's logit is read before it is written over
                factor = 1.0
                if factor_at is not None:
                    factor = tl.load(factor_at)
                for back in tl.range(0, V, BLOCK, num_stages=STAGES):
                    at = (V - 1) // BLOCK * BLOCK - back + column
                    x = tl.load(logits_at + at, mask=at < V, other=float("-inf")).to(tl.float32)
                    gradient = (tl.exp(x - log_sum) - tl.where(at == target, 1.0, 0.0)) * factor
                    tl.store(logits_at + at, gradient.to(logits_at.dtype.element_ty), mask=at < V)

    @triton.jit
    def _scale_kernel(gradient_at, by_at, step, V: tl.constexpr, BLOCK: tl.constexpr):
        by = tl.load(by_at).to(tl.float32)
        gradient_at += tl.program_id(0).to(tl.int64) * step
        if by != 1.0:
            for first in tl.range(0, V, BLOCK):
                at = first + tl.arange(0, BLOCK)
                gradient = tl.load(gradient_at + at, mask=at < V).to(tl.float32) * by
                tl.store(gradient_at + at, gradient.to(gradient_at.dtype.element_ty), mask=at < V)
