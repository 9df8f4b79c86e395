"""How fast batches go through a model, and attention alone: what each way of batching costs the device.

cuDNN's attention is left out of all that is timed here and in `steps`, see `without_cudnn_attention`.
"""

import functools
import itertools
import time
from collections.abc import Callable, Iterable, Iterator
from functools import partial

import numpy as np
import torch
from torch import Tensor

from helpers.lab import Timing, compare, device, each, experiment, peak_memory, phases
from helpers.lab.memory import GIB
from helpers.lab.records import STATUS, Row
from helpers.lab.timing import queue_ahead, synchronize
from helpers.models import GPT2LikeModel
from helpers.tasks import Batch
from helpers.tasks.language import balanced_batches, packed_batches, packed_way, random_batches
from helpers.text import SyntheticText
from helpers.text.synthetic import SIZE, draw_lengths

from .attention import causal_attention, forget_compiled, packed_attention, ways, without_cudnn_attention
from .datasets import StandardDataset
from .packed_layout import PackedLayout
from .packing import pack

MAX_LENGTH = 640  # the task's
SPREADS = (1, 5, 10, 20, 50, 640)  # k
FEEDS = {
    "BRAIN": partial(random_batches, whole=True),
    "BIG BRAIN": random_batches,
    **{f"k = {k}": partial(balanced_batches, k=k) for k in SPREADS},
    "packed": packed_batches,
}
LEAKING = "causal, leaking"
SHARES = {"min_ms": 0, "p5_ms": 5, "p25_ms": 25, "median_ms": 50, "p75_ms": 75, "p95_ms": 95, "max_ms": 100}
HELD = 20  # batches that wait on the device before the first is timed: fewer kernels than CUDA queues, about 1,000
AHEAD = 40_000_000  # clock cycles, 20 to 40 ms: longer than the host takes to queue the work of so many batches


def compute_dtype() -> torch.dtype:
    """bf16 on a GPU; on the CPU fp32, which every CPU has."""
    return torch.bfloat16 if device().type == "cuda" else torch.float32


@functools.lru_cache(maxsize=1)
def synthetic(samples: int, vocab_size: int) -> SyntheticText:
    """The text that is batched; the last one is kept."""
    return SyntheticText(samples, seed=0, vocab_size=vocab_size)


def words(width: int) -> int:
    """WikiText's vocabulary, or a small one for a small model."""
    return SIZE if width >= 1024 else 500


def build(text: SyntheticText, width: int, layers: int, head: bool) -> GPT2LikeModel:
    """`head=False` leaves out the product with the vocabulary, as the task does."""
    model = GPT2LikeModel(
        len(text.vocab), d_model=width, num_heads=8, num_layers=layers, max_length=MAX_LENGTH + 1, dropout=0.0
    )
    if not head:
        model.head = torch.nn.Identity()
    return model.to(device=device(), dtype=compute_dtype())


@experiment(
    small=[{"way": way, "width": 32, "batch_size": 4, "samples": 48} for way in ("BRAIN", "k = 5", "packed")],
    big_gpu=[
        {"way": way, "width": 1024, "batch_size": size, "samples": samples}
        for size, samples in ((64, 50_000), (256, 50_000))
        for way in FEEDS
    ],
    version=2,
)
@without_cudnn_attention()
def batch_time(way: str, width: int, batch_size: int, samples: int) -> Row:
    """An epoch of forward passes: embedding, positions, one decoder layer of 8 heads; no head, no backward.

    The decoder's memory is the embedded batch itself, under the causal mask. The epoch is gone through twice. First as
    a loop would, by the clock: the host makes a batch, copies it and launches its kernels, and the next. Then for the
    time of each batch, from the tokens on the device to the output, which is the device's: see `device_ms`.
    """
    text = synthetic(samples, words(width))
    model = build(text, width, layers=1, head=False).eval()
    dataset = StandardDataset(text, MAX_LENGTH + 1)
    batches, steps = FEEDS[way](dataset, batch_size, device(), compute_dtype(), 0)

    def forward(batch: Batch) -> None:
        model(batch.inputs, **batch.options)

    area = 0
    with torch.inference_mode():
        each(itertools.islice(batches(1, 0), 30), forward)  # warm up
        synchronize()
        began = time.perf_counter()
        for batch in batches(0, 0):
            forward(batch)
            area += batch.inputs.numel()
        synchronize()
        epoch_s = time.perf_counter() - began
        took = device_ms(batches(0, 0), forward)
    real = int((dataset.lengths - 1).sum())  # the last token of a sample has nothing to predict
    given = real + (len(dataset) if way == "packed" else 0)  # only packs keep it
    return {name: float(np.percentile(took, share)) for name, share in SHARES.items()} | {
        "mean_ms": float(np.mean(took)),
        "n": len(took),
        "batches": steps(0),
        "padding_share": 1 - given / area,
        "device_s": sum(took) / 1e3,
        "epoch_s": epoch_s,
        "real_tokens_per_s": real / epoch_s,
        "attention": packed_way(device(), compute_dtype()) if way == "packed" else "causal",
    }


def device_ms(batches: Iterable[Batch], run: Callable[[Batch], None]) -> list[float]:
    """Milliseconds of `run(batch)` for each batch that are the device's own: neither making a batch counts, nor
    launching its kernels, which takes a small batch longer than computing them.

    Batches are made `HELD` at a time. Then the device is kept busy with nothing while the host queues all their work.
    """
    took: list[float] = []
    batches = iter(batches)
    while held := list(itertools.islice(batches, HELD)):
        queue_ahead(AHEAD)
        took += each(held, run)
    return took


@experiment(
    small=[{"tokens": 256, "heads": 2, "head_dim": 16}],
    big_gpu=[{"tokens": tokens, "heads": 8, "head_dim": 128} for tokens in (2048, 8192, 32768)],
    version=2,
)
@without_cudnn_attention()
def attention(tokens: int, heads: int, head_dim: int) -> list[Row]:
    """Attention within documents by each way, forward and backward, and what is made once a batch, apart.

    The documents are samples of WikiText's lengths, packed. Beside them attention that is causal over the whole
    sequence, and so leaks from one document to the next: what packing without a mask costs. `peak_gib` is of a call and
    of what is made for it.
    """
    forget_compiled()
    dtype = compute_dtype()
    layout = PackedLayout(packed_offsets(tokens))
    q, k, v = (torch.randn(1, heads, tokens, head_dim, device=device(), dtype=dtype) for _ in range(3))
    grad = torch.randn_like(q)
    inputs = [part.requires_grad_() for part in (q, k, v)]
    rows, built = {}, {}
    for way, obstacle in ways(device(), dtype).items():
        rows[way] = {"way": way} | ({STATUS: f"not here: {obstacle}"} if obstacle else {})
        if not obstacle:
            built[way] = _build(layout, way)

    made = {way: partial(_build, layout, way) for way in built} | {LEAKING: lambda: causal_attention}

    def whole(attend: Callable[..., Tensor]) -> list[Tensor]:
        out = attend(q, k, v)
        return [out, *torch.autograd.grad(out, inputs, grad)]

    timed = compare({way: partial(whole, attend) for way, attend in built.items()})
    rows[LEAKING] = {"way": LEAKING}
    for way, attend in (built | {LEAKING: causal_attention}).items():
        apart = phases(partial(_phases, attend, q, k, v, grad))
        row = {f"{name}_ms": found.median_ms for name, found in apart.items()}
        memory = peak_memory(lambda make=made[way]: whole(make()))
        row |= {"peak_gib": memory.added_bytes / GIB, "n": apart["forward"].n}
        if way in built:
            row |= timed.timing(way).row() | {"ratio_to_dense": timed.ratio(way, "dense")[0]}
            row["build_ms"] = Timing.of(each(range(20), lambda _, way=way: _build(layout, way))).median_ms
        rows[way] |= row
    return list(rows.values())


def _build(layout: PackedLayout, way: str) -> Callable[..., Tensor]:
    """All that is made once a batch: from the offsets on."""
    return packed_attention(PackedLayout(layout.offsets), way, device(), compute_dtype())


def _phases(attend: Callable[..., Tensor], q: Tensor, k: Tensor, v: Tensor, grad: Tensor) -> Iterator[str]:
    out = attend(q, k, v)
    yield "forward"
    torch.autograd.grad(out, (q, k, v), grad)
    yield "backward"


def packed_offsets(tokens: int) -> np.ndarray:
    """Where documents of WikiText's lengths begin that fill `tokens`: the fullest of some packs, and padding."""
    lengths = np.minimum(draw_lengths(20 * max(tokens // 64, 8), seed=0), min(MAX_LENGTH, tokens))
    packs = pack(lengths, tokens, "best-fit")
    chosen = np.random.default_rng(0).permutation(lengths[packs[int(packs.loads.argmax())]])
    offsets = np.concatenate([[0], np.cumsum(chosen)])
    return offsets if offsets[-1] == tokens else np.append(offsets, tokens)
