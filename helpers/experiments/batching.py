"""What chapter 2 measures: what padding costs, what samplers and packers cost, how fast each kind of batches is.

cuDNN's attention is left out of all that is timed on a device, see `without_cudnn_attention`.
"""

import itertools
import time
from collections.abc import Callable, Iterator
from functools import partial

import numpy as np
import torch
from torch import Tensor

from helpers import train as trainer
from helpers.batching import BalancedBatchSampler, PackedLayout, StandardDataset, pack, peers, steps
from helpers.batching.attention import (
    VARIANTS,
    causal_attention,
    forget_compiled,
    missing_because,
    packed_attention,
    without_cudnn_attention,
)
from helpers.batching.packing import STRATEGIES
from helpers.lab import Timing, compare, device, each, experiment, peak_memory, phases
from helpers.lab.experiment import OUT_OF_MEMORY
from helpers.lab.machine import NOT_INSTALLED
from helpers.lab.memory import GIB
from helpers.lab.records import STATUS, Row
from helpers.lab.timing import synchronize
from helpers.metrics import LMCrossEntropyLoss
from helpers.text import SyntheticText
from helpers.text.synthetic import draw_lengths
from helpers.training import Batch
from helpers.training.text_batches import DATA, balanced_batches, packed_batches, packed_variant, random_batches

MAX_LENGTH = 640  # the task's
SPREADS = (1, 5, 10, 20, 50, 640)  # k
FEEDS = {
    "BRAIN": partial(random_batches, to_maximum=True),
    "BIG BRAIN": random_batches,
    **{f"k = {k}": partial(balanced_batches, k=k) for k in SPREADS},
    "packed": packed_batches,
}
PERCENTILES = {"min_ms": 0, "p5_ms": 5, "p25_ms": 25, "median_ms": 50, "p75_ms": 75, "p95_ms": 95, "max_ms": 100}
LEAKING = "causal, leaking"
NO_PADDING = "equally long, no padding"
BATCHES = 20  # that each variant's training steps go through, round and round
DENSE_BATCHES = 5  # of them by dense attention, whose masks are T² numbers each, and whose steps take equally long
OURS, TORCHTEXT = "BalancedBatchSampler", "torchtext's BucketIterator"


@experiment(
    small=[
        {"variant": variant, "width": 32, "batch_size": 4, "samples": 48} for variant in ("BRAIN", "k = 5", "packed")
    ],
    big_gpu=[
        {"variant": variant, "width": 1024, "batch_size": size, "samples": samples}
        for size, samples in ((64, 50_000), (256, 50_000))
        for variant in FEEDS
    ],
    version=2,
)
@without_cudnn_attention()
def batch_time(variant: str, width: int, batch_size: int, samples: int) -> Row:
    """An epoch of forward passes: embedding, positions, one decoder layer of 8 heads; no head, no backward.

    The decoder's memory is the embedded batch itself, under the causal mask. The epoch is gone through twice. First as
    a loop would, by the clock: the host makes a batch, copies it and launches its kernels, and the next. Then for the
    time of each batch, from the tokens on the device to the output, which is device time: see `device_ms`.
    """
    text = steps.synthetic_text(samples, width)
    model = steps.language_model(text, width, layers=1, max_length=MAX_LENGTH + 1, head=False).eval()
    dataset = StandardDataset(text, MAX_LENGTH + 1)
    batches, count = FEEDS[variant](dataset, batch_size, device(), steps.compute_dtype(), 0)

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
        took = steps.device_ms(batches(0, 0), forward)
    real = int((dataset.lengths - 1).sum())  # the last token of a sample has nothing to predict
    given = real + (len(dataset) if variant == "packed" else 0)  # only packs keep it
    return {name: float(np.percentile(took, share)) for name, share in PERCENTILES.items()} | {
        "mean_ms": float(np.mean(took)),
        "n": len(took),
        "batches": count(0),
        "padding_share": 1 - given / area,
        "device_s": sum(took) / 1e3,
        "epoch_s": epoch_s,
        "real_tokens_per_s": real / epoch_s,
        "attention": packed_variant(device(), steps.compute_dtype()) if variant == "packed" else "causal",
    }


@experiment(
    small=[{"tokens": 256, "heads": 2, "head_dim": 16}],
    big_gpu=[{"tokens": tokens, "heads": 8, "head_dim": 128} for tokens in (2048, 8192, 32768)],
    version=2,
)
@without_cudnn_attention()
def attention(tokens: int, heads: int, head_dim: int) -> list[Row]:
    """Attention within documents by each variant, forward and backward, and what is made once a batch, apart.

    The documents are samples of WikiText's lengths, packed. One more row is attention that is causal over the whole
    sequence, and so leaks from one document to the next: what packing without a mask costs. `peak_gib` is of a call and
    of what is made for it.
    """
    forget_compiled()
    offsets = steps.packed_offsets(tokens, MAX_LENGTH)
    q, k, v = (torch.randn(1, heads, tokens, head_dim, device=device(), dtype=steps.compute_dtype()) for _ in range(3))
    grad = torch.randn_like(q)
    inputs = [part.requires_grad_() for part in (q, k, v)]
    reasons = {variant: missing_because(variant, device(), steps.compute_dtype()) for variant in VARIANTS}

    def make(variant: str) -> Callable[..., Tensor]:  # all that is made once a batch, from the offsets on
        if variant == LEAKING:
            return causal_attention
        return packed_attention(PackedLayout(offsets), variant, device(), steps.compute_dtype())

    def whole(attend: Callable[..., Tensor]) -> list[Tensor]:
        out = attend(q, k, v)
        return [out, *torch.autograd.grad(out, inputs, grad)]

    def apart(attend: Callable[..., Tensor]) -> Iterator[str]:
        out = attend(q, k, v)
        yield "forward"
        torch.autograd.grad(out, inputs, grad)
        yield "backward"

    made = {variant: make(variant) for variant, reason in reasons.items() if not reason}
    timed = compare({variant: partial(whole, attend) for variant, attend in made.items()})
    rows: list[Row] = []
    for variant in (*VARIANTS, LEAKING):
        if reason := reasons.get(variant):
            rows.append({"variant": variant, STATUS: f"not here: {reason}"})
            continue
        taken = phases(partial(apart, made.get(variant, causal_attention)))
        memory = peak_memory(lambda variant=variant: whole(make(variant)))
        row = {f"{name}_ms": timing.median_ms for name, timing in taken.items()}
        row |= {"variant": variant, "peak_gib": memory.added_bytes / GIB, "n": taken["forward"].n}
        if variant in made:
            row |= timed.timing(variant).row() | {"ratio_to_dense": timed.ratio(variant, "dense")[0]}
            row["build_ms"] = Timing.of(each([variant] * 20, make)).median_ms
        rows.append(row)
    return rows


@experiment(
    small=[{"width": 32, "layers": 1, "batch_size": 4, "samples": 96, "rounds": 20}],
    big_gpu=[{"width": 1024, "layers": 8, "batch_size": size, "samples": 50_000, "rounds": 60} for size in (64, 256)],
    version=2,
    same_work=False,  # each step takes another batch
)
@without_cudnn_attention()
def throughput(width: int, layers: int, batch_size: int, samples: int, rounds: int) -> list[Row]:
    """Real tokens a second of training steps, forward, backward and AdamW, from one interleaved run.

    The limit is a batch of samples all as long as the mean one: the same model with nothing to pad. The others take
    batches of WikiText's lengths; each step of theirs is another batch, so the rate is over all of them. Batches, and
    the masks or tables that attention needs, are made before: `attention` has what those cost. First each variant goes
    through its batches, to warm up; one that runs out of memory is a row that says so, and the others go on without it.
    """
    forget_compiled()
    text = steps.synthetic_text(samples, width)
    dataset = StandardDataset(text, MAX_LENGTH + 1)
    model = steps.language_model(text, width, layers, max_length=MAX_LENGTH + 1)
    criterion = LMCrossEntropyLoss(text.vocab.pad_id)
    step = steps.training_step(model.parameters(), lambda b: criterion(model(b.inputs, **b.options), b.targets))

    feeds = {name: FEEDS[name] for name in ("BIG BRAIN", "k = 10")}
    for variant in VARIANTS:
        if not missing_because(variant, device(), steps.compute_dtype()):
            feeds[f"packed, {variant}"] = partial(packed_batches, variant=variant)
    variants = {NO_PADDING: _steps(step, [_full_batch(text, batch_size, round(float(dataset.lengths.mean())))])}
    for name, feed in feeds.items():
        batches, _ = feed(dataset, batch_size, device(), steps.compute_dtype(), 0)
        variants[name] = _steps(step, list(itertools.islice(batches(0, 0), BATCHES)))
    variants["packed, dense"].batches = variants["packed, dense"].batches[:DENSE_BATCHES]
    names = list(variants)
    for name in reversed(names):  # the largest last, when all masks are there
        if not variants[name].fit():
            del variants[name]
    rows = {row["variant"]: row for row in steps.rates(variants, rounds, warmup=1)}
    limit = rows.get(NO_PADDING)
    for row in rows.values():
        row["ratio_to_no_padding"] = row["real_tokens_per_s"] / limit["real_tokens_per_s"] if limit else None
    return [rows.get(name, {"variant": name, STATUS: OUT_OF_MEMORY}) for name in names]


def _steps(step: Callable[[Batch], None], batches: list[Batch]) -> steps.Steps:
    return steps.Steps(step, batches, float(np.mean([int((batch.targets != 0).sum()) for batch in batches])))


def _full_batch(text: SyntheticText, batch_size: int, length: int) -> Batch:
    tokens = torch.from_numpy(text.ids[: batch_size * (length + 1)].astype(np.int64)).view(batch_size, -1)
    tokens = tokens.to(device())  # (B, T + 1)
    return Batch(tokens[:, :-1], tokens[:, 1:], {"attend": causal_attention})


@experiment(
    small=[{"width": 32, "layers": 1, "batch_size": 4, "rounds": 20}],
    big_gpu=[{"width": 1024, "layers": 8, "batch_size": size, "rounds": 60} for size in (64, 256)],
    same_work=False,  # each step takes another batch
)
def collator(width: int, layers: int, batch_size: int, rounds: int) -> list[Row]:
    """Training steps of transformers' Llama, fed by its padding-free collator and by packs, in one interleaved run.

    The same model, attention kernel and optimizer, each eager and compiled: the collator's batches all have another
    length, so theirs for any, and packs have one. Batches are made before.
    """
    try:
        variants = peers.llama_steps(width, layers, batch_size, MAX_LENGTH, BATCHES)
    except ImportError:
        missing = f"{NOT_INSTALLED}transformers"
        return [{"variant": variant, STATUS: missing} for variant in (peers.COLLATOR, peers.PACKED)]
    rows = steps.rates(variants, rounds, warmup=BATCHES)
    return [row | {"ratio_to_collator": row["real_tokens_per_s"] / rows[0]["real_tokens_per_s"]} for row in rows]


@experiment(
    small=[{"data": data, "size": "small", "epochs": 1, "seed": 0} for data in DATA],
    big_gpu=[{"data": data, "size": "full", "epochs": 1, "seed": seed} for data in DATA for seed in range(3)],
    version=2,
)
@without_cudnn_attention()
def training(data: str, size: str, epochs: int, seed: int) -> Row:
    """A whole training run of the language model on each kind of batches: time, memory, and what it learned.

    All see the same samples; so at the end of an epoch all have seen as many real tokens.
    """
    precision = "bf16" if device().type == "cuda" else "fp32"
    setup = trainer.Setup(data=data, preset=size, epochs=epochs, seed=seed, precision=precision, autocast="torch")
    trained: list[Row] = []
    memory = peak_memory(lambda: trained.append(trainer.train(setup, progress=False)))
    names = ("validation_loss", "validation_accuracy", "train_loss", "steps", "source")
    told = {name: trained[0][name] for name in names}
    return told | {"train_s": trained[0]["seconds"], "peak_gib": memory.peak_gib}


def wikitext_lengths(samples: int) -> np.ndarray:
    """Lengths as WikiText's samples have them, cut to the task's 640."""
    return np.minimum(draw_lengths(samples, seed=0), MAX_LENGTH)


@experiment(
    small=[{"samples": 1000, "batch_size": 8}],
    cpu=[{"samples": 1_000_000, "batch_size": size} for size in (32, 256)],
)
def padding(samples: int, batch_size: int) -> list[Row]:
    """How much of each variant's batches is padding, how full they are, and how freely they are shuffled.

    `candidate_share` is the share of all samples that a sample can meet in a batch, on the mean.
    """
    lengths = wikitext_lengths(samples)
    shuffled = np.random.default_rng(0).permutation(samples)
    chunks = [shuffled[begin : begin + batch_size] for begin in range(0, samples, batch_size)]
    brain = {"padding_share": 1 - float(lengths.mean()) / MAX_LENGTH, "fill": 1.0}
    rows = [
        {"variant": "BRAIN", "candidate_share": 1.0} | brain,
        {"variant": "BIG BRAIN", "candidate_share": 1.0} | _fill(lengths, chunks, batch_size),
    ]
    for k in SPREADS:
        batches = list(BalancedBatchSampler(lengths, batch_size, k))
        row = {"variant": f"k = {k}", "candidate_share": _candidate_share(lengths, k)}
        rows.append(row | _fill(lengths, batches, batch_size))
    return rows


def _fill(lengths: np.ndarray, batches: list, batch_size: int) -> Row:
    area = sum(int(lengths[batch].max()) * len(batch) for batch in batches)
    fill = len(lengths) / (len(batches) * batch_size)
    return {"padding_share": 1 - int(lengths.sum()) / area, "batches": len(batches), "fill": fill}


def _candidate_share(lengths: np.ndarray, k: int) -> float:
    counts = np.bincount(lengths)
    before = np.concatenate([[0], np.cumsum(counts)])
    places = np.arange(len(counts))
    near = before[np.minimum(places + k + 1, len(counts))] - before[np.maximum(places - k, 0)]
    return float((counts * near).sum() / len(lengths) ** 2)


@experiment(
    small=[{"samples": n, "variant": name} for n in (1000, 4000) for name in (OURS, TORCHTEXT)],
    cpu=[{"samples": 10**power, "variant": name} for power in range(3, 8) for name in (OURS, TORCHTEXT)],
)
def sampler_scaling(samples: int, variant: str) -> Row:
    """What a sampler of batches of 32 costs: to make, until an epoch's first batch, and a batch, over whole epochs."""
    lengths, batch_size = wikitext_lengths(samples), 32
    began = time.perf_counter()
    try:
        make = peers.bucket_iterator if variant == TORCHTEXT else partial(BalancedBatchSampler, k=5)
        made = make(lengths, batch_size)
    except ImportError:
        return {STATUS: f"{NOT_INSTALLED}torchtext"}
    init_s = time.perf_counter() - began
    begin = made if variant == TORCHTEXT else partial(iter, made)
    first_ms, batch_us, began = [], [], time.perf_counter()
    while len(batch_us) < 2 or (len(batch_us) < 20 and time.perf_counter() - began < 3):
        start = time.perf_counter()
        batches = begin()
        next(batches)
        first_ms.append((time.perf_counter() - start) * 1e3)
        number = 1 + sum(1 for _ in batches)
        batch_us.append((time.perf_counter() - start) / number * 1e6)
    p20, median, p80 = np.percentile(batch_us, [20, 50, 80])
    row = {"init_s": init_s, "first_batch_ms": float(np.median(first_ms))}
    return row | {"batch_us": median, "batch_p20_us": p20, "batch_p80_us": p80, "n": len(batch_us)}


@experiment(
    small=[{"samples": 2000, "capacity": 1024, "strategy": strategy} for strategy in STRATEGIES],
    cpu=[
        {"samples": samples, "capacity": capacity, "strategy": strategy}
        for samples in (10_000, 1_000_000)
        for capacity in (640, 2048, 8192)
        for strategy in STRATEGIES
    ],
)
def packing(samples: int, capacity: int, strategy: str) -> Row:
    """How full sequences become by each strategy, what is lost, and how long it takes to find out."""
    lengths = wikitext_lengths(samples)
    took = []
    for _ in range(5):
        began = time.perf_counter()
        packs = pack(lengths, capacity, strategy)
        took.append(time.perf_counter() - began)
    lost = int(lengths.sum()) - int(packs.loads.sum())
    return {"sequences": len(packs), "fill": packs.fill, "tokens_lost": lost, "pack_s": float(np.median(took)), "n": 5}
