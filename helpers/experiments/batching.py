"""What chapter 2 measures: what padding costs, what samplers and packers cost, how fast each kind of batches is.

cuDNN's attention is left out of all that is timed on a device, see `without_cudnn_attention`.
"""

import itertools
import time
from collections.abc import Callable
from functools import partial

import numpy as np
import torch
from torch import Tensor

from helpers.batching import BalancedBatchSampler, PackedLayout, StandardDataset, pack, peers, steps
from helpers.batching.attention import (
    VARIANTS,
    causal_attention,
    forget_compiled,
    missing_because,
    without_cudnn_attention,
)
from helpers.batching.datasets import candidate_share, fill
from helpers.batching.packing import STRATEGIES
from helpers.lab import Timing, compare, device, each, experiment, half_dtype, peak_memory
from helpers.lab.experiment import OUT_OF_MEMORY, is_out_of_memory
from helpers.lab.machine import NOT_INSTALLED
from helpers.lab.memory import GIB
from helpers.lab.records import STATUS, Row
from helpers.lab.timing import check_agreement
from helpers.metrics import LMCrossEntropyLoss
from helpers.models import GPT2LikeModel
from helpers.text import SyntheticText
from helpers.training.language import guess_scores, text_task
from helpers.training.loop import fit
from helpers.training.text_batches import balanced_batches, full_batch, packed_batches, packed_variant, random_batches
from helpers.training.trainer import Precision, Trainer, mixed_precision

MAX_LENGTH = 640  # the task's
SPREADS = (1, 5, 10, 20, 50, 640)  # k
BRAIN, BIG_BRAIN, BALANCED, PACKED = STEPS = ("BRAIN", "BIG BRAIN", "k = 10", "packed")
FEEDS = {
    BRAIN: partial(random_batches, to_maximum=True),
    BIG_BRAIN: random_batches,
    **{f"k = {k}": partial(balanced_batches, k=k) for k in SPREADS},
    PACKED: packed_batches,
}
LEAKING, PER_DOCUMENT, NESTED = "causal, leaking", "SDPA per document", "nested tensors"
NO_PADDING = "equally long, no padding"
BATCHES = 20  # that each variant's training steps go through, round and round; 10 on a CPU
DENSE_BATCHES = 5  # of them by dense attention, whose masks are T² numbers each, and whose steps take equally long
OURS, TORCHTEXT = "BalancedBatchSampler", "torchtext's BucketIterator"


@experiment(
    small=[{"width": 32, "batch_size": 4, "samples": 24}],
    cpu=[{"width": 512, "batch_size": size, "samples": 1200} for size in (32, 128)],
    gpu=[{"width": 512, "batch_size": size, "samples": 20_000} for size in (32, 128)],
    big_gpu=[{"width": 1024, "batch_size": size, "samples": 50_000} for size in (64, 256)],
    version=3,
)
@without_cudnn_attention()
def batch_time(width: int, batch_size: int, samples: int) -> list[Row]:
    """An epoch of forward passes: embedding, positions, one decoder layer of 8 heads; no head, no backward.

    The decoder's memory is the embedded batch itself, under the causal mask. `epoch_s` is by the clock, as a loop goes:
    the host makes a batch, copies it and launches its kernels, and the next. The time of a batch, from the tokens on
    the device to the output, is device time; on a GPU it is taken in a second pass, see `device_ms`.
    """
    text = steps.text(samples, width)
    model = steps.language_model(text, width, layers=1, max_length=MAX_LENGTH + 1, head=False).eval()
    dataset = StandardDataset(text, MAX_LENGTH + 1)
    with torch.inference_mode():
        rows = [_epoch(variant, model, dataset, batch_size) for variant in FEEDS]
    baseline = rows[0]["real_tokens_per_s"]
    told = {"dtype": _said(steps.compute_dtype()), "source": text.source, "baseline": BRAIN}
    return [row | told | {"ratio_to_brain": row["real_tokens_per_s"] / baseline} for row in rows]


def _epoch(variant: str, model: GPT2LikeModel, dataset: StandardDataset, batch_size: int) -> Row:
    batches, _ = FEEDS[variant](dataset, batch_size, device(), steps.compute_dtype(), 0)
    epoch_s, took, area = steps.epoch(batches, lambda batch: model(batch.inputs, **batch.options))
    real = int((dataset.lengths - 1).sum())  # the last token of a sample has nothing to predict
    given = real + (len(dataset) if variant == PACKED else 0)  # only packs keep it
    return (
        {"variant": variant}
        | steps.percentiles(took)
        | {
            "batches": len(took),
            "padding_share": 1 - given / area,
            "device_s": sum(took) / 1e3,
            "epoch_s": epoch_s,
            "real_tokens_per_s": real / epoch_s,
            "attention": packed_variant(device(), steps.compute_dtype()) if variant == PACKED else "causal",
        }
    )


def _said(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


@experiment(
    small=[{"tokens": 256, "heads": 2, "head_dim": 16}],
    cpu=[{"tokens": tokens, "heads": 8, "head_dim": 64} for tokens in (1024, 4096)],
    gpu=[{"tokens": tokens, "heads": 8, "head_dim": 64} for tokens in (2048, 8192)],
    big_gpu=[{"tokens": tokens, "heads": 8, "head_dim": 128} for tokens in (2048, 8192, 32768)],
    version=3,
)
@without_cudnn_attention()
def attention(tokens: int, heads: int, head_dim: int) -> list[Row]:
    """Attention within documents by each variant, forward and backward, and what is made once a batch, apart.

    The documents are samples of WikiText's lengths. `SDPA per document` and `nested tensors` are what is written with
    torch alone; what fails there, says how. One more row is attention that is causal over the whole sequence, and so
    leaks from one document to the next. `peak_gib` is of a call and of what is made for it.
    """
    forget_compiled()
    offsets, dtype = steps.packed_offsets(tokens, MAX_LENGTH), steps.compute_dtype()
    q, k, v = (torch.randn(1, heads, tokens, head_dim, device=device(), dtype=dtype) for _ in range(3))
    grad = torch.randn_like(q)
    inputs = [part.requires_grad_() for part in (q, k, v)]
    makers = {variant: partial(peers.packed, variant) for variant in VARIANTS}
    makers |= {PER_DOCUMENT: peers.per_document, NESTED: peers.nested, LEAKING: lambda layout: causal_attention}

    def whole(attend: Callable[..., Tensor]) -> list[Tensor]:
        out = attend(q, k, v)
        return [out, *torch.autograd.grad(out, inputs, grad)]

    rows = {variant: {"variant": variant, "dtype": _said(dtype)} for variant in makers}
    made: dict[str, Callable[..., Tensor]] = {}
    for variant, make in makers.items():
        if reason := missing_because(variant, device(), dtype) if variant in VARIANTS else "":
            rows[variant][STATUS] = f"not here: {reason}"
            continue
        try:
            whole(attend := make(PackedLayout(offsets)))
            made[variant] = attend
        except Exception as error:
            if is_out_of_memory(error):
                raise
            rows[variant][STATUS] = f"not here: {str(error).strip().partition(chr(10))[0]}"[:160]
    check_agreement({name: partial(whole, attend) for name, attend in made.items() if name != LEAKING})
    timed = compare({name: partial(whole, attend) for name, attend in made.items()}, check=False)
    for variant in made:
        rows[variant] |= timed.row(variant, "dense")
        rows[variant]["build_ms"] = Timing.of(each([PackedLayout(offsets)] * 20, makers[variant])).median_ms
        memory = peak_memory(lambda make=makers[variant]: whole(make(PackedLayout(offsets))))
        rows[variant]["peak_gib"] = memory.added_bytes / GIB
    return list(rows.values())


@experiment(
    small=[{"width": 32, "layers": 1, "batch_size": 4, "samples": 96, "rounds": 20}],
    cpu=[{"width": 512, "layers": 2, "batch_size": 16, "samples": steps.WIKITEXT_SAMPLES, "rounds": 10}],
    gpu=[{"width": 512, "layers": 4, "batch_size": 32, "samples": 20_000, "rounds": 30}],
    big_gpu=[{"width": 1024, "layers": 8, "batch_size": size, "samples": 50_000, "rounds": 60} for size in (64, 256)],
    version=3,
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
    text = steps.text(samples, width)
    dataset = StandardDataset(text, MAX_LENGTH + 1)
    model = steps.language_model(text, width, layers, max_length=MAX_LENGTH + 1)
    criterion = LMCrossEntropyLoss(text.vocab.pad_id)
    step = steps.training_step(model.parameters(), lambda b: criterion(model(b.inputs, **b.options), b.targets))

    dtype, on_cuda = steps.compute_dtype(), device().type == "cuda"
    feeds = {name: FEEDS[name] for name in (BRAIN, BIG_BRAIN, BALANCED)}
    for variant in VARIANTS if on_cuda else ("dense", "varlen"):
        if not missing_because(variant, device(), dtype):
            feeds[f"packed, {variant}"] = partial(packed_batches, variant=variant)
    mean, count = round(float(dataset.lengths.mean())), BATCHES if on_cuda else BATCHES // 2
    variants = {NO_PADDING: steps.Steps.of(step, [full_batch(text, batch_size, mean, device())])}
    for name, feed in feeds.items():
        batches, _ = feed(dataset, batch_size, device(), dtype, 0)
        variants[name] = steps.Steps.of(step, list(itertools.islice(batches(0, 0), count)))
    variants["packed, dense"].batches = variants["packed, dense"].batches[:DENSE_BATCHES]
    variants[BRAIN].batches = variants[BRAIN].batches[:1]
    names = list(variants)
    for name in reversed(names):  # the largest last, when all masks are there
        if not variants[name].fit():
            del variants[name]
    rows = {row["variant"]: row for row in steps.rates(variants, rounds, warmup=1)}
    told = {"dtype": _said(dtype), "source": text.source, "baseline": NO_PADDING}
    limit = rows.get(NO_PADDING)
    for row in rows.values():
        row["ratio_to_no_padding"] = row["real_tokens_per_s"] / limit["real_tokens_per_s"] if limit else None
    return [rows.get(name, {"variant": name, STATUS: OUT_OF_MEMORY}) | told for name in names]


@experiment(
    small=[{"width": 32, "layers": 1, "batch_size": 4, "rounds": 20}],
    cpu=[{"width": 512, "layers": 2, "batch_size": 32, "rounds": 12}],
    gpu=[{"width": 512, "layers": 4, "batch_size": 32, "rounds": 30}],
    big_gpu=[{"width": 1024, "layers": 8, "batch_size": size, "rounds": 60} for size in (64, 256)],
    version=2,
    same_work=False,  # each step takes another batch
)
def collator(width: int, layers: int, batch_size: int, rounds: int) -> list[Row]:
    """Training steps of transformers' Llama, fed by its padding-free collator and by packs, in one interleaved run.

    The same weights and optimizer, each eager and compiled: the collator's batches all have another length, so theirs
    for any, and packs have one. On a GPU both have the same attention; on a CPU the collator has SDPA under the dense
    mask that transformers makes of its position_ids, and packs have ours. Batches are made before. `error` is that of a
    small model's logits for joined samples against each by itself: a leak between documents would show there.
    """
    count = BATCHES if device().type == "cuda" else BATCHES // 2
    try:
        theirs = peers.ATTENTION if device().type == "cuda" else peers.SDPA
        errors = {peers.COLLATOR: peers.leak(theirs), peers.PACKED: peers.leak(peers.ATTENTION)}
        variants = peers.llama_steps(width, layers, batch_size, MAX_LENGTH, count)
    except ImportError:
        missing = f"{NOT_INSTALLED}transformers"
        return [{"variant": variant, STATUS: missing} for variant in (peers.COLLATOR, peers.PACKED)]
    rows = steps.rates(variants, rounds, warmup=count)
    told = {"dtype": _said(steps.compute_dtype()), "baseline": peers.COLLATOR}
    for row in rows:
        row["ratio_to_collator"] = row["real_tokens_per_s"] / rows[0]["real_tokens_per_s"]
        row["error"] = errors[row["variant"].removesuffix(", compiled")]
    return [row | told for row in rows]


DATA = dict(zip(STEPS, ("base", "standard", "balanced", "sequenced"), strict=True))  # by the trainer's names
TRAINING = "width layers words samples max_length batch_size epochs learning_rate"


def _trainings(seeds: int, *sizes: float) -> list[Row]:
    of_run = dict(zip(TRAINING.split(), sizes, strict=True))
    return [{"data": data} | of_run | {"seed": seed} for data in STEPS for seed in range(seeds)]


@experiment(
    small=_trainings(1, 32, 1, 500, 48, MAX_LENGTH, 8, 1, 3e-3),
    cpu=_trainings(3, 128, 2, 2048, 2500, 128, 8, 1, 3e-3),
    gpu=_trainings(3, 256, 4, 8192, 10_000, MAX_LENGTH, 16, 1, 1e-3),
    big_gpu=_trainings(3, 512, 6, 24_725, 20_000, MAX_LENGTH, 64, 1, 3e-4),
    version=3,
)
@without_cudnn_attention()
def training(
    data: str,
    width: int,
    layers: int,
    words: int,
    samples: int,
    max_length: int,
    batch_size: int,
    epochs: int,
    learning_rate: float,
    seed: int,
) -> Row:
    """A whole training of the language model on each kind of batches: time, memory, and what it learned.

    On generated text, whose next tokens a small model learns to guess within an epoch of seconds. All see the same
    samples; so at the end of an epoch all have seen as many real tokens. `guess_accuracy` is that of always guessing
    the most frequent token, `guess_loss` that of the tokens' frequencies. On a CPU `peak_gib` is that of a step on the
    widest batch.
    """
    text, held_out = SyntheticText(samples, 0, words), SyntheticText(max(samples // 8, 1), 1, words)
    shape = {"d_model": width, "num_heads": max(width // 64, 1)}
    sizes = {"shape": (shape, shape), "layers": layers, "max_length": max_length, "dropout": 0.0}
    sizes |= {"batch_size": batch_size, "learning_rate": learning_rate}
    task = text_task(sizes, (text, held_out), device(), seed, DATA[data], half_dtype())
    trainer = Trainer(task, Precision() if steps.compute_dtype() == torch.float32 else mixed_precision())
    with trainer.settings():
        scores = fit(trainer, epochs=epochs)
        peak_gib = scores["peak_gib"]
        if peak_gib is None:
            widest = max(task.batches(0, 0), key=lambda batch: batch.inputs.numel())
            peak_gib = peak_memory(lambda: trainer.step(widest)).peak_gib
    return {
        "train_s": scores["epoch_s"],
        "peak_gib": peak_gib,
        "validation_loss": scores["validation_loss"],
        "validation_accuracy": scores["validation_accuracy"],
        **guess_scores(task),
        "steps": scores["steps"],
        "real_tokens": int((np.minimum(text.lengths, max_length + 1) - 1).sum()) * epochs,
        "source": text.source,
    }


@experiment(small=[{"samples": 1000, "batch_size": 8}], cpu=[{"samples": 10**6, "batch_size": b} for b in (32, 256)])
def padding(samples: int, batch_size: int) -> list[Row]:
    """How much of each variant's batches is padding, how full they are, and how freely they are shuffled.

    `candidate_share` is the share of all samples that a sample can meet in a batch, on the mean.
    """
    lengths = steps.wikitext_lengths(samples, MAX_LENGTH)
    shuffled = np.random.default_rng(0).permutation(samples)
    chunks = [shuffled[begin : begin + batch_size] for begin in range(0, samples, batch_size)]
    brain = {"padding_share": 1 - float(lengths.mean()) / MAX_LENGTH, "fill": 1.0}
    rows = [
        {"variant": "BRAIN", "candidate_share": 1.0} | brain,
        {"variant": "BIG BRAIN", "candidate_share": 1.0} | fill(lengths, chunks, batch_size),
    ]
    for k in SPREADS:
        batches = list(BalancedBatchSampler(lengths, batch_size, k))
        row = {"variant": f"k = {k}", "candidate_share": candidate_share(lengths, k)}
        rows.append(row | fill(lengths, batches, batch_size))
    return rows


@experiment(
    small=[{"samples": n, "variant": name} for n in (1000, 4000) for name in (OURS, TORCHTEXT)],
    cpu=[{"samples": 10**power, "variant": name} for power in range(3, 8) for name in (OURS, TORCHTEXT)],
)
def sampler_scaling(samples: int, variant: str) -> Row:
    """What a sampler of batches of 32 costs: to make, until an epoch's first batch, and a batch, over whole epochs."""
    lengths, batch_size = steps.wikitext_lengths(samples, MAX_LENGTH), 32
    began = time.perf_counter()
    try:
        make = peers.bucket_iterator if variant == TORCHTEXT else partial(BalancedBatchSampler, k=5)
        made = make(lengths, batch_size)
    except ImportError:
        return {STATUS: f"{NOT_INSTALLED}torchtext"}
    init_s = time.perf_counter() - began
    begin = made if variant == TORCHTEXT else partial(iter, made)
    return {"init_s": init_s} | steps.sampler_times(begin)


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
    lengths = steps.wikitext_lengths(samples, MAX_LENGTH)
    took = []
    for _ in range(5):
        began = time.perf_counter()
        packs = pack(lengths, capacity, strategy)
        took.append(time.perf_counter() - began)
    lost = int(lengths.sum()) - int(packs.loads.sum())
    return {"sequences": len(packs), "fill": packs.fill, "tokens_lost": lost, "pack_s": float(np.median(took)), "n": 5}
