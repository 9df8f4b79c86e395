"""Attention within documents: our variants, what is written with torch alone, and what leaks."""

from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.flex_attention import flex_attention

from ...batching import PackedLayout, packed_attention
from ...batching.attention import (
    VARIANTS,
    Attend,
    block_mask,
    causal_attention,
    missing_because,
    without_cudnn_attention,
)
from ...lab import Timing, Worth, compare, device, each, experiment, peak_memory
from ...lab.memory import GIB
from ...lab.records import STATUS, Row
from ...lab.records.experiment import is_out_of_memory
from ...lab.timing import check_agreement
from .inputs import compute_dtype, dtype_name, packed_offsets

LEAKING, PER_DOCUMENT = "causal, leaking", "SDPA per document"


@experiment(
    small=[{"tokens": 256, "heads": 2, "head_dim": 16}],
    cpu=[{"tokens": tokens, "heads": 8, "head_dim": 64} for tokens in (1024, 4096)],
    gpu=[{"tokens": tokens, "heads": 8, "head_dim": 64} for tokens in (2048, 8192)],
    big_gpu=[{"tokens": tokens, "heads": 8, "head_dim": 128} for tokens in (2048, 8192, 32768)],
    version=3,
    columns="variant dtype median_ms p20_ms p80_ms n baseline baseline_ms ratio build_ms peak_gib",
    worth=Worth(30, "attention within packed documents", cpu=9.4, gpu=4, big_gpu=14),
)
@without_cudnn_attention()
def attention(tokens: int, heads: int, head_dim: int) -> list[Row]:
    """Attention within documents by each variant, forward and backward, and what is made once a batch, apart.

    The documents are samples of WikiText's lengths. `SDPA per document` is what is written with torch alone.
    One more row is attention that is causal over the whole sequence, and so
    leaks from one document to the next. `peak_gib` is of a call and of what is made for it.
    """
    torch._dynamo.reset()  # `flex` is compiled for this length alone, as in a process of its own
    offsets = packed_offsets(tokens)
    q, k, v = (torch.randn(1, heads, tokens, head_dim, device=device(), dtype=compute_dtype()) for _ in range(3))
    grad = torch.randn_like(q)
    inputs = [part.requires_grad_() for part in (q, k, v)]
    makers = {variant: partial(_ours, variant) for variant in VARIANTS}
    makers |= {PER_DOCUMENT: _per_document, LEAKING: lambda layout: causal_attention}

    def whole(attend: Attend) -> list[Tensor]:
        out = attend(q, k, v)
        return [out, *torch.autograd.grad(out, inputs, grad)]

    rows = {variant: {"variant": variant, "dtype": dtype_name()} for variant in makers}
    runs: dict[str, Callable[[], list[Tensor]]] = {}
    for variant, make in makers.items():
        if reason := missing_because(variant, device(), compute_dtype()) if variant in VARIANTS else "":
            rows[variant][STATUS] = f"not here: {reason}"
            continue
        try:
            run = partial(whole, make(PackedLayout(offsets)))
            run()
            runs[variant] = run
        except Exception as error:
            if is_out_of_memory(error):
                raise
            rows[variant][STATUS] = f"not here: {str(error).strip().partition(chr(10))[0]}"[:160]
    check_agreement({name: run for name, run in runs.items() if name != LEAKING})
    timed = compare(runs, check=False)
    for variant in runs:
        rows[variant] |= timed.row(variant, "dense")
        rows[variant]["build_ms"] = Timing.of(each([PackedLayout(offsets)] * 20, makers[variant])).median_ms
        memory = peak_memory(lambda make=makers[variant]: whole(make(PackedLayout(offsets))))
        rows[variant]["peak_gib"] = memory.added_bytes / GIB
    return list(rows.values())


def _ours(variant: str, layout: PackedLayout) -> Attend:
    """Our variant; on a CPU `flex` is torch's own, as ours computes it as `dense` does."""
    if variant == "flex" and device().type == "cpu":
        return partial(flex_attention, block_mask=block_mask(layout.documents, "cpu"))
    return packed_attention(layout, variant, device(), compute_dtype())


def _per_document(layout: PackedLayout) -> Attend:
    """SDPA for each document, written with torch alone."""
    sizes = layout.lengths[layout.lengths > 0].tolist()

    def attend(*inputs: Tensor) -> Tensor:
        parts = zip(*(part.split(sizes, dim=2) for part in inputs), strict=True)
        return torch.cat([F.scaled_dot_product_attention(*part, is_causal=True) for part in parts], dim=2)

    return attend
