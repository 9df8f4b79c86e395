"""Cross-entropy that overwrites the logits with their gradient, for layers that compute gradients in forward.

With a large vocabulary the logits are the largest tensor of a training step: 16 GiB at 32,768 tokens and 128,256 words
in fp32. Here neither the log-softmax nor the gradient needs a second tensor of this size.

A program of the Triton kernel takes one row. A first pass computes the largest logit and the sum of exponentials
(online softmax: both are rescaled at a new maximum). A second pass, in reverse order so that most reads hit the cache,
writes softmax − one-hot. The cost is 2b bytes of traffic a logit (b = bytes an element) and no extra memory; torch
reads or writes a logit six times and allocates three tensors of the logits' size.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from .launch import launch, on_triton, stages, tl, triton

IGNORED = -100  # the target of a token that is left out of the loss
# Most logits in registers at a time, 16 a thread: with 32 warps a multiprocessor takes one row at a time, and 132 rows
# of a large vocabulary in bf16 fit in the L2 cache of an H200.
BLOCK = 16384


@torch.no_grad()
def loss_and_gradient(logits: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    """The fp32 loss (N,) of each row of logits (N, V), 0 for the target -100, and the gradient (N, V) of their sum.

    The gradient overwrites the logits: the second result is the first argument. No autograd node.
    """
    if logits.dim() != 2 or logits.shape[-1] == 0 or not logits.is_floating_point():
        raise ValueError(f"logits must be floating-point (N, V), not {logits.dtype} of shape {tuple(logits.shape)}")
    if target.shape != logits.shape[:1] or target.dtype not in (torch.int32, torch.int64):
        expected = f"int64 or int32 of shape {tuple(logits.shape[:1])}"
        raise ValueError(f"target must be {expected}, not {target.dtype} of shape {tuple(target.shape)}")
    if on_triton(logits) and logits.stride(1) == 1:
        count, vocabulary = logits.shape
        losses = torch.empty(count, dtype=torch.float32, device=logits.device)
        block = min(BLOCK, triton.next_power_of_2(vocabulary))
        launch(
            _loss_kernel, count, logits, target.contiguous(), losses, logits.stride(0), IGNORED, V=vocabulary,
            BLOCK=block, STAGES=stages(block * logits.element_size()), num_warps=max(1, block // 512),
        )  # fmt: skip
    else:
        wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
        losses = F.cross_entropy(wide, target.long(), ignore_index=IGNORED, reduction="none")
        hit = torch.arange(wide.shape[1], device=wide.device) == target[:, None]  # (N, V)
        logits.copy_(torch.where((target != IGNORED)[:, None], wide.softmax(1) - hit.to(wide.dtype), 0))
    torch.autograd.graph.increment_version(logits)  # a backward that saved the overwritten logits then raises
    return losses, logits


if triton is not None:

    @triton.jit
    def _loss_kernel(
        logits_at, target_at, losses_at, step, ignored,
        V: tl.constexpr, BLOCK: tl.constexpr, STAGES: tl.constexpr,
    ):  # fmt: skip
        row = tl.program_id(0).to(tl.int64)
        logits_at += row * step
        target = tl.load(target_at + row)
        column = tl.arange(0, BLOCK)
        if target == ignored:
            tl.store(losses_at + row, 0.0)
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
                # With only −∞ so far, the base is 0 and the sums stay 0, not NaN.
                base = tl.where(largest == float("-inf"), 0.0, largest)
                sums = sums * tl.exp(before - base) + tl.exp(x - base)
            log_sum = largest + tl.log(tl.sum(sums, axis=0))
            # A target outside the vocabulary makes the loss NaN.
            inside = (target >= 0) & (target < V)
            loss = log_sum - tl.load(logits_at + target, mask=inside, other=float("nan")).to(tl.float32)
            tl.store(losses_at + row, loss)
            tl.debug_barrier()  # the target's logit must be read before it is overwritten
            for back in tl.range(0, V, BLOCK, num_stages=STAGES):
                at = (V - 1) // BLOCK * BLOCK - back + column
                x = tl.load(logits_at + at, mask=at < V, other=float("-inf")).to(tl.float32)
                gradient = tl.exp(x - log_sum) - tl.where(at == target, 1.0, 0.0)
                tl.store(logits_at + at, gradient.to(logits_at.dtype.element_ty), mask=at < V)
