"""The head's matrix product and the cross-entropy: from hidden states (T, C) and the head's weight (V, C) to a scalar.

With V = 128256 the logits are the largest tensor of a small Llama's training: 0.25 MiB a token in bf16, and the
plain loss allocates them about three times, partly in fp32. The gradient of the cross-entropy follows directly from the
logits, so `chunked` computes loss and gradients for a chunk of tokens at a time and never allocates (T, V) numbers.
It computes the same three matrix products as the plain loss; nothing is recomputed.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from ..lab.precision import autocast_dtype, without_autocast

IGNORED = -100  # the target of a token that is left out of the loss
GIB = 2**30

Head = Callable[[Tensor, Tensor, Tensor], Tensor]  # (x (T, C), weight (V, C), targets (T,)) -> mean loss
# (logits (T, V), targets (T,)) -> losses (T,) in fp32 and their gradients (T, V), in the type of the logits
Pieces = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]


def full(x: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    """All logits at once, and their cross-entropy in fp32."""
    return F.cross_entropy(F.linear(x, weight).float(), targets, ignore_index=IGNORED)


def torch_chunked(x: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    """torch's chunked loss (2.13 and later). It needs all inputs in one dtype and sums the loss in it: in bf16, a loss
    near 6 has a resolution of 1/32, and is off by one or two steps."""
    dtype = compute_dtype(x)
    with without_autocast(x):
        x, weight = x.to(dtype), weight.to(dtype)
        options = torch.nn.LinearCrossEntropyOptions()
        return F.linear_cross_entropy(x, weight, targets, ignore_index=IGNORED, options=options)


def chunked(
    x: Tensor,
    weight: Tensor,
    targets: Tensor,
    *,
    chunk: int | None = None,
    logits_gib: int = 1,
    pieces: Pieces | None = None,
) -> Tensor:
    """Cross-entropy of x @ weight.T, a chunk of tokens at a time, with the gradients computed in forward.

    Memory: one chunk's logits and their gradient, and, saved from forward to backward, the gradients of x and `weight`
    (accumulated in the weight's dtype). A chunk is as many tokens as have `logits_gib` of logits: a larger one makes
    larger products, and fewer additions to the weight's gradient. `pieces` computes loss and gradient of a chunk's
    logits. Backward runs once.
    """
    x = x.flatten(0, -2)
    if chunk is None:
        chunk = chunk_length(len(x), len(weight), compute_dtype(x), logits_gib)
    if not torch.is_grad_enabled():
        x, weight = x.detach(), weight.detach()  # so that no gradient is computed
    return _Chunked.apply(x, weight, targets.flatten(), chunk, pieces or loss_and_gradient)


def chunk_length(tokens: int, vocabulary: int, dtype: torch.dtype, logits_gib: int = 1) -> int:
    """The largest power of two of tokens whose logits take at most so many GiB; at most `tokens`."""
    most = max(logits_gib * GIB // (vocabulary * dtype.itemsize), 1)
    return max(min(2 ** (most.bit_length() - 1), tokens), 1)


def loss_and_gradient(logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Losses (T,) and the logits' gradient (T, V) of the summed cross-entropy; ignored tokens get 0.

    Compiled, it costs two reads of the logits and one write.
    """
    wide = logits.float()
    counts = targets != IGNORED
    normaliser = wide.logsumexp(dim=-1)  # (T,)
    target = wide.gather(1, targets.clamp(min=0)[:, None])[:, 0]
    hit = torch.arange(wide.shape[1], device=wide.device) == targets[:, None]  # (T, V)
    gradient = ((wide - normaliser[:, None]).exp() - hit.float()) * counts[:, None]
    return (normaliser - target) * counts, gradient.to(logits.dtype)


class _Chunked(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, weight: Tensor, targets: Tensor, chunk: int, pieces: Pieces) -> Tensor:
        dtype = compute_dtype(x)
        need_x, need_weight = ctx.needs_input_grad[:2]
        grad_x = torch.empty_like(x) if need_x else None
        grad_weight = torch.zeros_like(weight) if need_weight else None
        count = (targets != IGNORED).sum()
        losses = torch.zeros((), dtype=torch.float32, device=x.device)
        with without_autocast(x):
            w = weight.to(dtype)
            for begin in range(0, len(x), chunk):
                rows = slice(begin, begin + chunk)
                part = x[rows].to(dtype)
                loss, grad = pieces(part @ w.T, targets[rows])  # (chunk,), (chunk, V)
                losses += loss.sum()
                if need_x:
                    grad_x[rows] = grad @ w
                if need_weight:
                    grad_weight += grad.T @ part
                del grad
        ctx.save_for_backward(grad_x, grad_weight, count)
        return losses / count

    @staticmethod
    def backward(ctx, upstream: Tensor) -> tuple[Tensor | None, ...]:
        # Scaled in place; autograd's version check then raises on a second backward, which would scale them again.
        grad_x, grad_weight, count = ctx.saved_tensors
        scale = upstream / count
        grads = [None if grad is None else grad.mul_(scale) for grad in (grad_x, grad_weight)]
        return *grads, None, None, None


def compute_dtype(x: Tensor) -> torch.dtype:
    """The dtype of the matrix products: autocast's where it is on, else x's."""
    return autocast_dtype(x) or x.dtype
