"""Cross-entropy over a vocabulary as one Triton kernel that writes the gradient where the logits were.

A program takes one row. It walks over it once for the largest logit and the sum of exponentials (online softmax: both
are corrected when a larger one turns up), and walks back writing (softmax − one-hot) · factor. The way back starts with
what was read last, so that most of it comes from the cache. It costs 2b bytes a logit from memory (b = bytes an
element) and no memory; torch's reads or writes a logit six times and allocates three tensors of the logits' size.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from .where import launch

# Logits at a time at most, 16 a thread: 32 warps leave room for one row on a multiprocessor, and 132 rows of a large
# vocabulary in bf16 are what the cache of an H200 holds.
BLOCK = 16384
AHEAD = 2**16  # bytes of shared memory in which a program may keep logits that it will need next
SCALE_BLOCK = 4096


def stages(block_bytes: int) -> int:
    """How far the pipeline reaches: 3 is two blocks on their way while one is worked on, 1 is no pipeline."""
    return 1 + min(2, AHEAD // block_bytes)


def losses_over(
    logits: Tensor, target: Tensor, factor: Tensor | None, ignore_index: int, write_gradient: bool
) -> Tensor:
    """The loss of each row of (N, V) logits in fp32; the gradient of their sum, times `factor`, is
    written over the logits."""
    count, vocabulary = logits.shape
    losses = torch.empty(count, dtype=torch.float32, device=logits.device)
    block = min(BLOCK, triton.next_power_of_2(vocabulary))
    launch(
        _losses, count, logits, target, losses, factor, logits.stride(0), ignore_index,
        V=vocabulary, BLOCK=block, WRITE=write_gradient,
        STAGES=stages(block * logits.element_size()), num_warps=max(1, block // 512),
    )  # fmt: skip
    return losses


def scale(gradient: Tensor, by: Tensor) -> None:
    """Multiply (N, V) in place by a number that lies on the GPU. Where it is 1, nothing is read but the number."""
    count, vocabulary = gradient.shape
    launch(_scale, count, gradient, by, gradient.stride(0), V=vocabulary, BLOCK=SCALE_BLOCK, num_warps=8)


@triton.jit
def _losses(
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
def _scale(gradient_at, by_at, step, V: tl.constexpr, BLOCK: tl.constexpr):
    by = tl.load(by_at).to(tl.float32)
    gradient_at += tl.program_id(0).to(tl.int64) * step
    if by != 1.0:
        for first in tl.range(0, V, BLOCK):
            at = first + tl.arange(0, BLOCK)
            gradient = tl.load(gradient_at + at, mask=at < V).to(tl.float32) * by
            tl.store(gradient_at + at, gradient.to(gradient_at.dtype.element_ty), mask=at < V)
