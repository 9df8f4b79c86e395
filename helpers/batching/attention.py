"""Attention over packed sequences that never looks across documents and is causal within each.

    layout = PackedLayout(packed.offsets, len(packed.tokens))     # once a batch, with offsets on the host
    attend = packed_attention(layout, "varlen", "cuda")           # once a batch, for all layers
    out = attend(q, k, v)                                         # (1, heads, T, head_dim), in any model
    logits = model(tokens, positions=positions, attend=attend)    # in GPT2LikeModel

Three variants with the same result. For T positions in documents of lengths l, and a head:

    variant  made once a batch                  a call                                       runs
    dense    T² numbers of mask, on the device  all T² scores, and the mask read by each     anywhere
    flex     tables of (T / 128)² on the host,  the (128, 128) blocks that some document     CUDA; on the CPU
             one copy                           touches, by a compiled kernel                without speed
    varlen   the offsets, one copy              Σ l² / 2 scores, by FlashAttention, on the   CUDA: fp16, bf16;
                                                CPU by `documents_attention`                 CPU: any

`missing_because` says why one doesn't run on a machine. None makes the host wait for the GPU: all that is needed there
(the longest document, the tables) is worked out on the host from the offsets.

`dense` adds its mask to the scores, in their type: 2·T² bytes in halves, 4·T² in fp32, held as long as `attend` is, and
shared by all layers. (A boolean mask, a byte a pair, would take more: each call would turn it into such a mask and save
that for backward.) It alone drops attention weights out; the kernels of the other two can't.

`flex` compiles on its first call on CUDA, for some seconds, and again for another type, number of heads, head_dim, or
gradients wanted or not. The first other T compiles once more, to kernels for any T, which may be a little slower:
batches of one T need none of it. The number of documents never matters. On the CPU FlexAttention has no backward and
does not compile inside a model; a call that needs either is computed as `dense` does.
"""

import contextlib
import functools
import inspect
import math
from collections.abc import Callable, Iterator, Sequence

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, flex_attention
from torch.overrides import _pop_mode, _push_mode

from ..lab import machine
from ..lab.arguments import check_choice
from ..lab.precision import autocast_dtype
from .documents import documents_attention
from .packed import PackedLayout, causal_mask

VARIANTS = {  # what each needs to run
    "dense": (),
    "flex": ("CUDA", "triton"),  # to be fast; on the CPU it runs as well
    "varlen": ("CUDA", "compute capability 8.0"),  # or a CPU
}
Attend = Callable[..., Tensor]  # (q, k, v, dropout=0.0) -> out, all (B, heads, T, head_dim)

HALVES = (torch.float16, torch.bfloat16)
BLOCK = 128  # positions: FlexAttention's default
ALIGNED_NUMBERS = 8  # fused attention copies a mask whose rows don't begin at multiples of it
ALIGNED_INTS = 4  # int32s in 16 bytes: what compiled kernels like their inputs to start at a multiple of
COMPILATIONS = 64  # torch's own limit is 8 for each function, and a notebook that measures has more kinds of calls


def packed_attention(
    layout: PackedLayout, variant: str, device: torch.device | str, dtype: torch.dtype | None = None
) -> Attend:
    """What all layers of a model call for a batch: `attend(q, k, v, dropout=0.0)`.

    q, k and v are (1, heads, T, head_dim); k and v may have fewer heads, each for a group of q's. Batches of several
    packed rows are one: lay the rows one after another. Under autocast, torch's or ours, it computes in its type. If
    that is given as `dtype`, the mask of `dense` is made now, and otherwise in the first call.
    """
    device = torch.device(device)
    check_choice(VARIANTS, variant=variant)
    if reason := missing_because(variant, device):
        raise ValueError(f"variant is {variant!r}, which can't run on {device}: {reason}")
    compute = {"dense": _dense, "flex": _flex, "varlen": _varlen}[variant](layout, device, dtype)
    length = len(layout)

    def attend(q: Tensor, k: Tensor, v: Tensor, dropout: float = 0.0) -> Tensor:
        for name, part in (("q", q), ("k", k), ("v", v)):
            if part.dim() != 4 or part.shape[0] != 1 or part.shape[2] != length:
                raise ValueError(
                    f"{name} is {tuple(part.shape)}; the layout ends at {length}, so it must be "
                    f"(1, heads, {length}, head_dim)"
                )
        if dropout and variant != "dense":
            raise ValueError(
                f"dropout is {dropout}; {variant!r} has no dropout of attention weights: "
                "build the model with attention_dropout=0.0, or take 'dense'"
            )
        return compute(*_cast(q, k, v), dropout)

    return attend


def causal_attention(q: Tensor, k: Tensor, v: Tensor, dropout: float = 0.0) -> Tensor:
    """The same for rows that are not packed: (B, heads, T, head_dim), causal, padding on the right.

    `model(tokens, attend=causal_attention)` is the model that a packed one is compared with: it differs in this alone.
    """
    return F.scaled_dot_product_attention(q, k, v, dropout_p=dropout, is_causal=True, enable_gqa=_grouped(q, k))


def missing_because(variant: str, device: torch.device | str, dtype: torch.dtype | None = None) -> str:
    """Why a variant can't run on a device, in a type if that is known; "" if it can."""
    device = torch.device(device)
    if variant in ("flex", "varlen") and device.type == "cpu":
        return ""
    if reason := machine.missing_because(*VARIANTS[variant], device=device):
        return reason
    if variant == "varlen" and not torch.backends.cuda.is_flash_attention_available():
        return "needs a build of torch with FlashAttention"
    if variant == "varlen" and dtype not in (None, *HALVES):
        return f"needs fp16 or bf16, not {str(dtype).removeprefix('torch.')}"
    return ""


@contextlib.contextmanager
def without_cudnn_attention() -> Iterator[None]:
    """Inside, `scaled_dot_product_attention` is left to kernels other than cuDNN's; also a decorator.

    On Hopper torch asks cuDNN first, which makes a plan for each new (B, T), forward and backward apart: tens to
    hundreds of milliseconds of the host, against less than one of a layer's work. Batches padded to their longest pay
    that hundreds of times an epoch. `sdpa_kernel(SDPBackend.CUDNN_ATTENTION)` still gets cuDNN inside.
    """
    before = torch.backends.cuda.cudnn_sdp_enabled()
    torch.backends.cuda.enable_cudnn_sdp(False)
    try:
        yield
    finally:
        torch.backends.cuda.enable_cudnn_sdp(before)


def _dense(layout: PackedLayout, device: torch.device, dtype: torch.dtype | None) -> Attend:
    (documents,) = to_device([layout.documents], device)
    masks: dict[torch.dtype, Tensor] = {}

    def mask_for(dtype: torch.dtype) -> Tensor:
        if dtype not in masks:
            if torch.compiler.is_compiling():  # in a graph for training the compiler keeps one for all calls
                return _added_mask(documents, dtype)
            with torch.inference_mode(False):  # or no gradient could come after a call without them
                masks[dtype] = _added_mask(documents, dtype)
        return masks[dtype]

    if dtype is not None:
        mask_for(dtype)

    def compute(q: Tensor, k: Tensor, v: Tensor, dropout: float) -> Tensor:
        mask = mask_for(q.dtype)
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, dropout_p=dropout, enable_gqa=_grouped(q, k))

    return compute


def _added_mask(documents: Tensor, dtype: torch.dtype) -> Tensor:
    """(T, T) What is added to the scores: 0 where `causal_mask` allows a look, else −∞. Rows begin aligned."""
    length = len(documents)
    columns = -(-length // ALIGNED_NUMBERS) * ALIGNED_NUMBERS
    added = documents.new_zeros(length, columns, dtype=dtype)[:, :length]
    return added.masked_fill_(causal_mask(documents).logical_not_(), -math.inf)


def _flex(layout: PackedLayout, device: torch.device, dtype: torch.dtype | None) -> Attend:
    blocks = block_mask(layout.documents, device)
    dense = _dense(layout, device, None) if device.type == "cpu" else None
    # For fewer than 128 tokens torch would choose the kernel for decoding, which 2.11 can't build for grouped heads.
    options = {"BACKEND": "TRITON"} if device.type == "cuda" else None

    def compute(q: Tensor, k: Tensor, v: Tensor, dropout: float) -> Tensor:
        if dense and (torch.compiler.is_compiling() or any(part.requires_grad for part in (q, k, v))):
            return dense(q, k, v, dropout)
        if torch.compiler.is_compiling():
            return flex_attention(q, k, v, block_mask=blocks, enable_gqa=_grouped(q, k), kernel_options=options)
        with _without_modes():
            compiled = _compiled_flex(device.type)
            return compiled(q, k, v, block_mask=blocks, enable_gqa=_grouped(q, k), kernel_options=options)

    return compute


@functools.cache
def _compiled_flex(kind: str) -> Callable[..., Tensor]:
    """FlexAttention, compiled for CUDA; on the CPU only traced, so that no C++ compiler is asked for."""
    config = torch._dynamo.config
    config.recompile_limit = max(config.recompile_limit, COMPILATIONS)
    return torch.compile(flex_attention, backend="inductor" if kind == "cuda" else "eager", fullgraph=True)


def block_mask(documents: np.ndarray, device: torch.device | str, size: int = BLOCK) -> BlockMask:
    """FlexAttention's mask of one batch: causal, within documents, where `documents` (T,) int32 are ascending numbers.

    Equal to `create_block_mask`'s, number by number, but that asks of each of the T² pairs whether it is seen, in
    memory for T² answers, and this costs O(T + (T / 128)²) in numpy and one copy to the device. Documents lie one after
    another, so a block's first and last position say it all. A block of keys that lies before a block of queries is

        seen at all    if the last key and the first query are of one document
        seen whole     if the first key and the last query are of one document (then all between them are)

    and the blocks on the diagonal are seen in part. "Full" and "partial" are torch's names for these two kinds.
    """
    number = -(-len(documents) // size)
    first, last = documents[::size], documents[size - 1 :: size]  # (N,) of each block; the last one may be cut off
    cut = len(last) < number
    last = np.append(last, documents[-1]) if cut else last
    before = np.tri(number, k=-1, dtype=bool)  # (N, N) queries × keys
    full = before & (first[None, :] == last[:, None])
    if cut:
        full[-1] = False  # torch counts a block that is cut off as seen in part
    partial = (before & (last[None, :] == first[:, None]) & ~full) | np.eye(number, dtype=bool)

    tables = []  # for each row how many blocks are seen, (N,), and their numbers, those seen first, (N, N)
    for seen in (partial, full, partial.T, full.T):
        tables += [seen.sum(axis=-1, dtype=np.int32), np.argsort(~seen, axis=-1, kind="stable").astype(np.int32)]
    of_position, *tables = to_device([documents, *tables], device)
    names = ("kv", "full_kv", "q", "full_q")
    counts = {f"{name}_num_blocks": table[None, None] for name, table in zip(names, tables[::2], strict=True)}
    indices = {f"{name}_indices": table[None, None] for name, table in zip(names, tables[1::2], strict=True)}

    def visible(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return (of_position[query] == of_position[key]) & (query >= key)

    length = len(documents)
    return BlockMask(seq_lengths=(length, length), **counts, **indices, BLOCK_SIZE=(size, size), mask_mod=visible)


def _varlen(layout: PackedLayout, device: torch.device, dtype: torch.dtype | None) -> Attend:
    (offsets,) = to_device([layout.offsets], device)
    if device.type == "cpu":
        return lambda q, k, v, dropout: documents_attention(q, k, v, offsets)
    return _flash(layout, offsets)


def _flash(layout: PackedLayout, offsets: Tensor) -> Attend:
    from torch.nn.attention.varlen import varlen_attn

    longest = int(layout.lengths.max())
    asks_for_groups = "enable_gqa" in inspect.signature(varlen_attn).parameters  # before torch 2.12 it didn't

    def compute(q: Tensor, k: Tensor, v: Tensor, dropout: float) -> Tensor:
        if q.dtype not in HALVES or q.shape[-1] % 8 or q.shape[-1] > 256:
            got = f"{q.dtype} with head_dim {q.shape[-1]}"
            raise ValueError(f"'varlen' got {got}; it takes fp16 or bf16, and multiples of 8 up to 256")
        groups = {"enable_gqa": True} if asks_for_groups and _grouped(q, k) else {}
        q, k, v = (part[0].transpose(0, 1) for part in (q, k, v))  # (T, heads, head_dim)
        out = varlen_attn(q, k, v, offsets, offsets, longest, longest, window_size=(-1, 0), **groups)
        return out.transpose(0, 1)[None]  # (1, heads, T, head_dim)

    return compute


def to_device(arrays: Sequence[np.ndarray], device: torch.device | str) -> list[Tensor]:
    """Arrays of int32 as tensors of the device, in one copy. On CUDA it is queued from pinned memory: nothing waits."""
    starts = np.cumsum([0, *(-(-array.size // ALIGNED_INTS) * ALIGNED_INTS for array in arrays)]).tolist()
    on_cuda = torch.device(device).type == "cuda"
    buffer = torch.zeros(starts[-1], dtype=torch.int32, device="cpu", pin_memory=on_cuda)
    for array, start in zip(arrays, starts, strict=False):
        buffer.numpy()[start : start + array.size] = array.ravel()
    there = buffer.to(device, non_blocking=True)
    return [there[a : a + array.size].view(array.shape) for array, a in zip(arrays, starts, strict=False)]


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
