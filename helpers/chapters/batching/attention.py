"""Attention within documents: our variants, what is written with torch alone, and what leaks."""

from collections.abc import Callable
from functools import partial
from types import SimpleNamespace

import pandas as pd
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
from ...book.table import Worth, table
from ...book.values import TIMES, lacking, of_kernels, speedup, timed
from ...lab import STATUS, Row, Timing, compare, device, each, peak_memory
from ...lab.memory import GIB, is_out_of_memory
from ...lab.timing import check_agreement, queue_far_ahead
from .inputs import compute_dtype, dtype_name, packed_offsets

DENSE, LEAKING, PER_DOCUMENT = "dense", "causal, leaking", "SDPA per document"
PADDED = "padded, causal"
KERNELS = ("flex", "varlen")  # that compute no scores across documents


@table(
    small=[{"tokens": 256, "heads": 2, "head_dim": 16}],
    cpu=[{"tokens": tokens, "heads": 8, "head_dim": 64} for tokens in (1024, 4096)],
    # the longer ones' q, k, v, output and their gradients are over 200 MB, four times the L2 of 50 MB
    gpu=[{"tokens": tokens, "heads": 8, "head_dim": 64} for tokens in (8192, 32768)],
    big_gpu=[{"tokens": tokens, "heads": 8, "head_dim": 128} for tokens in (8192, 32768)],
    version=3,
    columns="variant dtype median_ms p20_ms p80_ms n baseline baseline_ms ratio build_ms peak_gib",
    worth=Worth(30, "attention within packed documents", cpu=9.4, gpu=4, big_gpu=14),
)
@without_cudnn_attention()
def attention(tokens: int, heads: int, head_dim: int) -> list[Row]:
    """Attention within documents by each variant, forward and backward, and what is made once a batch, apart.

    The documents are samples of WikiText's lengths. `SDPA per document` is what is written with torch alone.
    One more row is attention that is causal over the whole sequence, and so leaks from one document to the next. On a
    GPU the baseline is a batch of the same documents, padded to the longest, in torch's causal attention, which is
    FlashAttention where that runs; else it is the mask of `dense`. The host is 10 ms ahead of a GPU. `peak_gib` is of a
    call and of what is made for it.
    """
    torch._dynamo.reset()  # `flex` is compiled for this length alone, as in a process of its own
    layout = PackedLayout(packed_offsets(tokens))
    packed = [torch.randn(1, heads, tokens, head_dim, device=device(), dtype=compute_dtype()) for _ in range(4)]
    rows: dict[str, Row] = {}
    runs: dict[str, Callable[[], list[Tensor]]] = {}
    makers: dict[str, Callable[[PackedLayout], Callable[[], list[Tensor]]]] = {}
    for variant, make in _makers().items():
        rows[variant] = {"variant": variant, "dtype": dtype_name()}
        if reason := missing_because(variant, device(), compute_dtype()) if variant in VARIANTS else "":
            rows[variant][STATUS] = f"not here: {reason}"
            continue
        inputs = pad(layout, packed) if variant == PADDED else packed
        makers[variant] = partial(_call, make, inputs)
        try:
            run = makers[variant](layout)
            run()
            runs[variant] = run
        except Exception as error:
            if is_out_of_memory(error):
                raise
            rows[variant][STATUS] = f"not here: {str(error).strip().partition(chr(10))[0]}"[:160]
    computed = {name: partial(unpad, layout, run) if name == PADDED else run for name, run in runs.items()}
    check_agreement({name: run for name, run in computed.items() if name != LEAKING})
    timed = compare(runs, check=False, before=queue_far_ahead)
    for variant in runs:
        rows[variant] |= timed.row(variant, PADDED if PADDED in runs else DENSE)
        fresh = [PackedLayout(layout.offsets)] * 20
        rows[variant]["build_ms"] = Timing.of(each(fresh, makers[variant])).median_ms
        memory = peak_memory(lambda make=makers[variant]: make(PackedLayout(layout.offsets))())
        rows[variant]["peak_gib"] = memory.added_bytes / GIB
    return list(rows.values())


def _makers() -> dict[str, Callable[[PackedLayout], Attend]]:
    makers: dict[str, Callable[[PackedLayout], Attend]] = {variant: partial(_ours, variant) for variant in VARIANTS}
    makers |= {PER_DOCUMENT: _per_document, LEAKING: lambda layout: causal_attention}
    return makers | ({PADDED: lambda layout: causal_attention} if device().type == "cuda" else {})


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


def _call(
    make: Callable[[PackedLayout], Attend], inputs: list[Tensor], layout: PackedLayout
) -> Callable[[], list[Tensor]]:
    return partial(both_ways, make(layout), *(part.requires_grad_() for part in inputs[:3]), inputs[3])


def both_ways(attend: Attend, q: Tensor, k: Tensor, v: Tensor, gradient: Tensor) -> list[Tensor]:
    """The output of attention, and the gradients of q, k and v."""
    out = attend(q, k, v)
    return [out, *torch.autograd.grad(out, (q, k, v), gradient)]


@torch.no_grad()
def pad(layout: PackedLayout, packed: list[Tensor]) -> list[Tensor]:
    """The documents of (1, heads, T, head_dim) as rows of a batch (B, heads, longest, head_dim), zeros after them."""
    batch, longest = len(layout.lengths), int(layout.lengths.max())
    rows, places = (torch.from_numpy(index).long().to(device()) for index in (layout.documents, layout.positions))
    padded = [part.new_zeros(batch, part.shape[1], longest, part.shape[3]) for part in packed]
    for target, part in zip(padded, packed, strict=True):
        target[rows, :, places] = part[0].transpose(0, 1)  # (T, heads, head_dim)
    return padded


def unpad(layout: PackedLayout, run: Callable[[], list[Tensor]]) -> list[Tensor]:
    """What `run` returns for a padded batch, (B, heads, longest, head_dim), without the padding: (1, heads, T, …)."""
    rows, places = (torch.from_numpy(index).long().to(device()) for index in (layout.documents, layout.positions))
    return [padded[rows, :, places].transpose(0, 1)[None] for padded in run()]


# Numbers


@attention.numbers()
def _(rows: pd.DataFrame) -> SimpleNamespace:
    """Attention within documents by each variant; `within` is the faster kernel against the padded batch's.

    Both are at the most tokens, whose arrays no cache holds. Without a padded batch, on a CPU, there is no such ratio.
    """
    names = ["tokens", "variant", "build_ms", "median_ms", "p20_ms", "p80_ms", "ratio", "peak_mib"]
    shapes = sorted(set(zip(rows["heads"], rows["head_dim"], strict=True)))
    baseline = rows["baseline"].iloc[0]
    longest = rows[rows["tokens"] == rows["tokens"].max()]
    padded = longest[longest["variant"] == PADDED].to_dict("records")
    kernels = longest[longest["variant"].isin(KERNELS) & (longest["baseline"] == PADDED)].to_dict("records")
    gains = {row["variant"]: of_kernels(speedup(row), row["variant"], row, *padded) for row in kernels}
    fastest = max((name for name in gains if gains[name].measured), key=lambda name: float(gains[name]), default="")
    absent = next(iter(gains.values()), lacking("attention within documents beside a padded batch", TIMES))
    return SimpleNamespace(
        table=timed(rows.assign(peak_mib=1024 * rows["peak_gib"]), names).rename(
            columns={"ratio": f"time, {baseline} = 1"}
        ),
        shape=", ".join(f"{heads} heads of {size}" for heads, size in shapes),
        tokens=int(longest["tokens"].iloc[0]),
        within=gains.get(fastest, absent),
        fastest=fastest,
    )
