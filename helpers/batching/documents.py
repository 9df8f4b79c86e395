"""Attention document by document on a CPU: what FlashAttention's `varlen` is on a GPU.

torch's fused attention for CPUs takes rectangles. Here it is called once for each document, on views of q, k and v, so
that Σ l² / 2 scores are computed and nothing is padded or copied. All documents are one operator and one node of the
graph of autograd, which `torch.compile` leaves as it is: offsets may differ from batch to batch without compiling anew.

Halves are computed in fp32 where that is faster with torch 2.13: without AMX, as backward in bf16 takes twice as long
as in fp32 (with AVX-512); with it, the backward of short documents, where it takes up to five times as long. The
casts are those of one document at a time, which fits the cache.
"""

import itertools

import torch
from torch import Tensor

OPERATORS = __name__.partition(".")[0]  # the package has two names, which share no operator
_forward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
LONG = 24_576  # numbers of a document in a head's queries from which on AMX's backward in bf16 is faster than in fp32


def documents_attention(q: Tensor, k: Tensor, v: Tensor, offsets: Tensor) -> Tensor:
    """Causal attention within each document; q, k, v (1, heads, T, head_dim), k and v may have fewer heads.

    Document i lies at `offsets[i]` to `offsets[i + 1]`, int32 on the CPU, and the last ends at T.
    """
    if groups := q.shape[1] // k.shape[1] - 1:
        k, v = (part.repeat_interleave(groups + 1, dim=1) for part in (k, v))
    return _attend(q, k, v, offsets)[0]


def _computed_in(dtype: torch.dtype, numbers: int = LONG) -> torch.dtype:
    return dtype if dtype.itemsize > 2 or (numbers >= LONG and torch.cpu._is_amx_tile_supported()) else torch.float32


def _summed_in(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)


def _spans(offsets: Tensor) -> list[slice]:
    ends = offsets.numpy().tolist()  # tolist of a tensor reads each number by itself
    return [slice(begin, end) for begin, end in itertools.pairwise(ends) if end > begin]


def _like(q: Tensor) -> Tensor:
    """Memory for (1, heads, T, head_dim) in which a position's heads lie together, as the next product reads them."""
    batch, heads, length, size = q.shape
    return q.new_empty(batch, length, heads, size).transpose(1, 2)


@torch.library.custom_op(f"{OPERATORS}::documents_attention", mutates_args=(), device_types="cpu")
def _attend(q: Tensor, k: Tensor, v: Tensor, offsets: Tensor) -> tuple[Tensor, Tensor]:
    """The output, and the logarithm of each softmax's denominator (1, T, heads), which backward needs."""
    dtype = _computed_in(q.dtype)
    out, denominators = _like(q), q.new_empty(q.shape[0], q.shape[2], q.shape[1], dtype=_summed_in(q.dtype))
    for span in _spans(offsets):
        inputs = (part[:, :, span].to(dtype) for part in (q, k, v))
        out[:, :, span], logsumexp = _forward(*inputs, 0.0, True)
        denominators[:, span] = logsumexp.transpose(1, 2)
    return out, denominators


@_attend.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, offsets: Tensor) -> tuple[Tensor, Tensor]:
    return _like(q), q.new_empty(q.shape[0], q.shape[2], q.shape[1], dtype=_summed_in(q.dtype))


@torch.library.custom_op(f"{OPERATORS}::documents_attention_backward", mutates_args=(), device_types="cpu")
def _differentiate(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, denominators: Tensor, offsets: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    grads = _like(q), _like(k), _like(v)
    for span in _spans(offsets):
        dtype = _computed_in(q.dtype, (span.stop - span.start) * q.shape[-1])
        inputs = (part[:, :, span].to(dtype) for part in (grad, q, k, v, out))
        saved = denominators[:, span].transpose(1, 2)
        for whole, part in zip(grads, _backward(*inputs, saved, 0.0, True), strict=True):
            whole[:, :, span] = part
    return grads


@_differentiate.register_fake
def _(grad: Tensor, q: Tensor, k: Tensor, v: Tensor, *_: object) -> tuple[Tensor, Tensor, Tensor]:
    return _like(q), _like(k), _like(v)


def _save(ctx: object, inputs: tuple, output: tuple[Tensor, Tensor]) -> None:
    q, k, v, offsets = inputs
    ctx.save_for_backward(q, k, v, *output, offsets)


def _gradients(ctx: object, grad: Tensor, _: object) -> tuple:
    return *_differentiate(grad, *ctx.saved_tensors), None


_attend.register_autograd(_gradients, setup_context=_save)
