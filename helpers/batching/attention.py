"""Attention over packed sequences that never looks across documents and is causal within each.

    layout = PackedLayout(packed.offsets, len(packed.tokens))     # once a batch, with offsets on the host
    attend = packed_attention(layout, "varlen", "cuda")           # once a batch, for all layers
    out = attend(q, k, v)                                         # (1, heads, T, head_dim), in any model
    logits = model(tokens, positions=positions, attend=attend)    # in GPT2LikeModel

Three ways to the same result. For T positions in documents of lengths l, and a head:

    way     made once a batch                  a call                                       runs
    dense   T² numbers of mask, on the device  all T² scores, and the mask read by each     anywhere
    flex    tables of (T / 128)² on the host,  the (128, 128) blocks that some document     CUDA; on the CPU
            one copy                           touches, by a compiled kernel                without speed
    varlen  the offsets, one copy              Σ l² / 2 scores, by FlashAttention           CUDA, fp16 and bf16

`ways(device, dtype)` says which of them run and why the others don't. None makes the host wait for the GPU: all that
is needed there (the longest document, the tables) is worked out on the host from the offsets.

`flex` compiles on its first call on CUDA, for some seconds; so do the first call with another type, number of heads,
head_dim, or gradients wanted or not. The first other T compiles once more, to kernels for any T, which may be a
little slower: batches of one T need none of it. The number of documents never matters. On the CPU FlexAttention has no
backward, and does not compile inside a model. There a call that needs either takes what the block mask says, pair by
pair, (T, T), to `scaled_dot_product_attention`: right, not fast.

The mask of `dense` is what is added to the scores, in the type that they are computed in: 2·T² bytes in halves, 4·T² in
fp32, held as long as `attend` is, and no more for 16 layers than for one. A boolean one, a byte a pair, would come to
more: each call would make another such mask of it, and keep that for backward.

Weights are dropped out by `dense` alone; the kernels of the two others have no dropout.

`without_cudnn_attention` is for batches of many lengths, and for comparisons in which some ways have many.
"""

import contextlib
import functools
import importlib.util
import inspect
import math
from collections.abc import Callable, Iterator

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.flex_attention import flex_attention
from torch.overrides import _pop_mode, _push_mode

from helpers.lab.precision import autocast_dtype

from . import flex_blocks
from .documents import causal_mask
from .packed_layout import PackedLayout, to_device

WAYS = ("dense", "flex", "varlen")
Attend = Callable[..., Tensor]  # (q, k, v, dropout=0.0) -> out, all (B, heads, T, head_dim)

HALVES = (torch.float16, torch.bfloat16)
FLASH_CAPABILITY = (8, 0)
ALIGNED = 8  # numbers: fused attention copies a mask whose rows don't begin at multiples of it
COMPILATIONS = 64  # torch's own limit is 8 for each function, and a notebook that measures has more kinds of calls


def packed_attention(
    layout: PackedLayout, way: str, device: torch.device | str, dtype: torch.dtype | None = None
) -> Attend:
    """What all layers of a model call for a batch: `attend(q, k, v, dropout=0.0)`.

    q, k and v are (1, heads, T, head_dim); k and v may have fewer heads, each for a group of q's. Batches of several
    packed rows are one: lay the rows one after another. Under autocast, torch's or ours, it computes in its type. If
    that is given as `dtype`, the mask of `dense` is made now, and otherwise in the first call.
    """
    device = torch.device(device)
    if way not in WAYS:
        raise ValueError(f"unknown way {way!r} of attention; valid: {', '.join(WAYS)}")
    if obstacle := _obstacle(way, device, None):
        raise ValueError(f"way {way!r} {obstacle}")
    compute = {"dense": _dense, "flex": _flex, "varlen": _varlen}[way](layout, device, dtype)
    length = len(layout)

    def attend(q: Tensor, k: Tensor, v: Tensor, dropout: float = 0.0) -> Tensor:
        for name, part in (("q", q), ("k", k), ("v", v)):
            if part.dim() != 4 or part.shape[0] != 1 or part.shape[2] != length:
                raise ValueError(
                    f"{name} is {tuple(part.shape)}; the layout ends at {length}, so it must be "
                    f"(1, heads, {length}, head_dim)"
                )
        if dropout and way != "dense":
            raise ValueError(
                f"way {way!r} has no dropout of attention weights, and dropout is {dropout}; "
                "build the model with attention_dropout=0.0, or take 'dense'"
            )
        return compute(*_cast(q, k, v), dropout)

    return attend


def causal_attention(q: Tensor, k: Tensor, v: Tensor, dropout: float = 0.0) -> Tensor:
    """The same for rows that are not packed: (B, heads, T, head_dim), causal, padding on the right.

    `model(tokens, attend=causal_attention)` is the model that a packed one is compared with: it differs in this alone.
    """
    return F.scaled_dot_product_attention(q, k, v, dropout_p=dropout, is_causal=True, enable_gqa=_grouped(q, k))


def ways(device: torch.device | str, dtype: torch.dtype) -> dict[str, str]:
    """For each way why it does not run there, for a table to say so; empty where it runs."""
    return {way: _obstacle(way, torch.device(device), dtype) for way in WAYS}


def _obstacle(way: str, device: torch.device, dtype: torch.dtype | None) -> str:
    """Why a way does not run there; a type that isn't known yet is no obstacle."""
    if way == "dense":
        return ""
    if way == "flex":
        if device.type not in ("cuda", "cpu"):
            return f"needs CUDA or the CPU, and this is {device.type}"
        return "" if device.type == "cpu" or importlib.util.find_spec("triton") else "needs Triton, not installed"
    if device.type != "cuda":
        return f"needs FlashAttention's kernels on CUDA, and this is {device.type}"
    if not torch.backends.cuda.is_flash_attention_available():
        return "needs FlashAttention's kernels, which this build of torch lacks"
    if torch.cuda.get_device_capability(device) < FLASH_CAPABILITY:
        return "needs a GPU of compute capability 8.0 or more, and this has less"
    return "" if dtype is None or dtype in HALVES else f"needs fp16 or bf16, not {str(dtype).removeprefix('torch.')}"


@contextlib.contextmanager
def without_cudnn_attention() -> Iterator[None]:
    """Inside, `scaled_dot_product_attention` is left to the other kernels; also a decorator.

    On Hopper torch asks cuDNN first if that is new enough, and cuDNN makes a plan for each new (B, T), forward and
    backward apart: tens to hundreds of milliseconds of the host, against less than one of a layer's work. Who pads each
    batch to its longest pays for that in hundreds of batches of an epoch, and who has one T pays once. Whoever asks for
    cuDNN by name, with `sdpa_kernel(SDPBackend.CUDNN_ATTENTION)`, gets it inside, too.
    """
    before = torch.backends.cuda.cudnn_sdp_enabled()
    torch.backends.cuda.enable_cudnn_sdp(False)
    try:
        yield
    finally:
        torch.backends.cuda.enable_cudnn_sdp(before)


def forget_compiled() -> None:
    """Forget all that was compiled here: `flex` is then compiled for the next T alone, as in a process of its own.

    Costs that compilation, and those of whatever else torch.compile made in this process and is called again.
    """
    torch._dynamo.reset()
    _compiled_flex.cache_clear()


def _dense(layout: PackedLayout, device: torch.device, dtype: torch.dtype | None) -> Attend:
    (documents,) = to_device([layout.documents], device)
    masks: dict[torch.dtype, Tensor] = {}

    def mask_for(dtype: torch.dtype) -> Tensor:
        if dtype not in masks:
            if torch.compiler.is_compiling():  # in a graph for training the compiler keeps one for all calls
                return _added(documents, dtype)
            with torch.inference_mode(False):  # or no gradient could come after a call without them
                masks[dtype] = _added(documents, dtype)
        return masks[dtype]

    if dtype is not None:
        mask_for(dtype)

    def compute(q: Tensor, k: Tensor, v: Tensor, dropout: float) -> Tensor:
        mask = mask_for(q.dtype)
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, dropout_p=dropout, enable_gqa=_grouped(q, k))

    return compute


def _added(documents: Tensor, dtype: torch.dtype) -> Tensor:
    """(T, T) What is added to the scores: 0 where `causal_mask` allows a look, else −∞. Rows begin aligned."""
    length = len(documents)
    added = documents.new_zeros(length, -(-length // ALIGNED) * ALIGNED, dtype=dtype)[:, :length]
    return added.masked_fill_(causal_mask(documents).logical_not_(), -math.inf)


def _flex(layout: PackedLayout, device: torch.device, dtype: torch.dtype | None) -> Attend:
    mask = flex_blocks.block_mask(layout.documents, device)
    pairs = flex_blocks.spelled_out(layout.documents) if device.type == "cpu" else None  # (T, T)

    def compute(q: Tensor, k: Tensor, v: Tensor, dropout: float) -> Tensor:
        if pairs is not None and (torch.compiler.is_compiling() or any(part.requires_grad for part in (q, k, v))):
            return F.scaled_dot_product_attention(q, k, v, attn_mask=pairs, enable_gqa=_grouped(q, k))
        if torch.compiler.is_compiling():
            return flex_attention(q, k, v, block_mask=mask, enable_gqa=_grouped(q, k))
        with _without_modes():
            return _compiled_flex(device.type)(q, k, v, block_mask=mask, enable_gqa=_grouped(q, k))

    return compute


def _varlen(layout: PackedLayout, device: torch.device, dtype: torch.dtype | None) -> Attend:
    from torch.nn.attention.varlen import varlen_attn

    (offsets,) = to_device([layout.offsets], device)
    longest = layout.longest
    asks_for_groups = "enable_gqa" in inspect.signature(varlen_attn).parameters  # before torch 2.12 it didn't

    def compute(q: Tensor, k: Tensor, v: Tensor, dropout: float) -> Tensor:
        if q.dtype not in HALVES or q.shape[-1] % 8 or q.shape[-1] > 256:
            raise ValueError(
                f"way 'varlen' got {q.dtype} with head_dim {q.shape[-1]}; it takes fp16 or bf16, "
                "and multiples of 8 up to 256"
            )
        groups = {"enable_gqa": True} if asks_for_groups and _grouped(q, k) else {}
        q, k, v = (part[0].transpose(0, 1) for part in (q, k, v))  # (T, heads, head_dim)
        out = varlen_attn(q, k, v, offsets, offsets, longest, longest, window_size=(-1, 0), **groups)
        return out.transpose(0, 1)[None]

    return compute


@functools.cache
def _compiled_flex(kind: str) -> Callable[..., Tensor]:
    """FlexAttention, compiled for CUDA; on the CPU only traced, so that no C++ compiler is asked for."""
    config = torch._dynamo.config
    config.recompile_limit = max(config.recompile_limit, COMPILATIONS)
    return torch.compile(flex_attention, backend="inductor" if kind == "cuda" else "eager", fullgraph=True)


@contextlib.contextmanager
def _without_modes() -> Iterator[None]:
    """Our Autocast is a mode in Python, which a compiler can't trace. What it would cast is cast by then."""
    modes = [_pop_mode() for _ in range(torch._C._len_torch_function_stack())]
    try:
        yield
    finally:
        for mode in reversed(modes):
            _push_mode(mode)


def _cast(*tensors: Tensor) -> tuple[Tensor, ...]:
    """The tensors in the type of the autocast region, if this is one: the kernels here don't know of it."""
    dtype = autocast_dtype(tensors[0])
    return tensors if dtype is None else tuple(tensor.to(dtype) for tensor in tensors)


def _grouped(q: Tensor, k: Tensor) -> bool:
    return q.shape[1] != k.shape[1]
