"""A language model on each kind of batches: forward passes, training steps, whole trainings."""

import itertools
from dataclasses import replace
from functools import partial

import numpy as np
import torch
from torch import Tensor

from ...batching import StandardDataset
from ...batching.attention import VARIANTS, missing_because, without_cudnn_attention
from ...lab import Worth, device, experiment, half_dtype, peak_memory
from ...lab.memory import OUT_OF_MEMORY, PeakAbove
from ...lab.records import STATUS, Row
from ...metrics import LMCrossEntropyLoss
from ...training.language import frequent_words, guess_scores, open_texts, text_task
from ...training.loop import fit
from ...training.text_batches import balanced_batches, full_batch, packed_batches, random_batches
from ...training.trainer import Batch, Precision, Trainer, mixed_precision
from .inputs import MAX_LENGTH, WIKITEXT_SAMPLES, compute_dtype, dtype_name, language_model, text, wikitext_of
from .samplers_and_packers import SPREADS
from .step_times import Epoch, epochs, fits, rates, training_step

BRAIN, BIG_BRAIN, BALANCED, PACKED = STEPS = ("BRAIN", "BIG BRAIN", "k = 10", "packed")
BY_TOKENS = f"{BALANCED}, loss by tokens"
FEEDS = {
    BRAIN: partial(random_batches, to_maximum=True),
    BIG_BRAIN: random_batches,
    **{f"k = {k}": partial(balanced_batches, k=k) for k in SPREADS},
    PACKED: packed_batches,
}
PERCENTILES = {"min_ms": 0, "p25_ms": 25, "median_ms": 50, "p75_ms": 75, "max_ms": 100}
NO_PADDING = "equally long, no padding"
BATCHES = 20  # that each variant's training steps go through in a round; 10 on a CPU
DENSE_BATCHES = 5  # of them by dense attention, whose masks are T² numbers each, and whose steps take equally long
DATA = dict(zip(STEPS, ("base", "standard", "balanced", "sequenced"), strict=True)) | {BY_TOKENS: "balanced"}
TRAINING = "width layers words samples max_length batch_size epochs learning_rate"


@experiment(
    small=[{"width": 32, "batch_size": 4, "samples": 24}],
    cpu=[{"width": 1024, "batch_size": 32, "samples": 600}],
    gpu=[{"width": 512, "batch_size": size, "samples": 20_000} for size in (32, 128)],
    big_gpu=[{"width": 1024, "batch_size": size, "samples": 20_000} for size in (64, 256)],
    version=4,
    columns=f"variant {' '.join(PERCENTILES)} mean_ms batches padding_share epoch_s real_tokens_per_s us_per_token? "
    "loader_s? dtype source",
    worth=Worth(40, "time of a forward pass by batching", cpu=110, gpu=15, big_gpu=20),
)
@without_cudnn_attention()
def batch_time(width: int, batch_size: int, samples: int) -> list[Row]:
    """An epoch of forward passes: embedding, positions, one decoder layer of 8 heads; no head, no backward.

    The decoder's memory is the embedded batch itself, under the causal mask. `epoch_s` is by the clock. On a CPU it is
    as a loop goes: the host makes a batch and computes it, and the next. On a GPU the batches of a part lie on the
    device before it begins, and `loader_s` is what it takes to make and copy all of them: with a loop's workers that is
    hidden behind the steps, or is the limit. The variants' epochs take turns, a part each, whose times for a real token
    are `us_per_token`. The time of a batch, from the tokens on the device to the output, is device time; on a GPU it is
    taken in a second pass, see `device_ms`.
    """
    samples = text(samples, width)
    model = language_model(samples, width, layers=1, head=False).eval()
    dataset = StandardDataset(samples, MAX_LENGTH + 1)
    feeds = {name: feed(dataset, batch_size, device(), compute_dtype(), 0) for name, feed in FEEDS.items()}
    origin = {"dtype": dtype_name(), "source": samples.source}

    def run(batch: Batch) -> Tensor:
        return model(batch.inputs, **batch.options)

    with torch.inference_mode():
        taken = epochs(feeds, run)
        return [_epoch(name, epoch, len(dataset)) | epoch.row(run) | origin for name, epoch in taken.items()]


def _epoch(variant: str, epoch: Epoch, samples: int) -> Row:
    tokens = sum(epoch.real) + (samples if variant == PACKED else 0)  # the last of a sample, which only packs keep
    row = {"variant": variant, "batches": len(epoch.times_ms), "padding_share": 1 - tokens / epoch.positions}
    row |= {"mean_ms": float(np.mean(epoch.times_ms))}
    return row | {name: float(np.percentile(epoch.times_ms, share)) for name, share in PERCENTILES.items()}


@experiment(
    small=[{"width": 128, "layers": 1, "batch_size": 4, "samples": 96, "rounds": 20}],  # flex wants heads of 16
    cpu=[{"width": 512, "layers": 2, "batch_size": 16, "samples": WIKITEXT_SAMPLES, "rounds": 6}],
    gpu=[{"width": 512, "layers": 4, "batch_size": 32, "samples": 20_000, "rounds": 6}],
    big_gpu=[{"width": 1024, "layers": 8, "batch_size": 256, "samples": 20_000, "rounds": 6}],
    version=4,
    columns="variant median_ms p20_ms p80_ms n real_tokens_per_s us_per_token? ratio_to_no_padding dtype source"
    " baseline",
    worth=Worth(50, "tokens/s of a model by batching", cpu=39.2, gpu=8, big_gpu=30),
)
@without_cudnn_attention()
def throughput(width: int, layers: int, batch_size: int, samples: int, rounds: int) -> list[Row]:
    """Real tokens a second of training steps, forward, backward and AdamW, from one interleaved run.

    The limit is a batch of samples all as long as the mean one: the same model with nothing to pad. The others take
    batches of WikiText's lengths, the same ones in each round; any two variants are a pair in each of `us_per_token`.
    `batch_size` is the most samples in a batch of k = 10, whose length few samples may have: on a GPU, where a step
    has a least time, the others take as many samples as have equally many real tokens.
    Batches, and the masks or tables that attention needs, are made before: `attention` has what those cost. First
    each variant goes through its batches, to warm up; one that runs out of memory is a row that says so, and the
    others go on without it.
    """
    torch._dynamo.reset()  # `flex` is compiled for this length alone, as in a process of its own
    samples = text(samples, width)
    dataset = StandardDataset(samples, MAX_LENGTH + 1)
    model = language_model(samples, width, layers)
    criterion = LMCrossEntropyLoss(samples.vocab.pad_id)
    step = training_step(model.parameters(), lambda b: criterion(model(b.inputs, **b.options), b.targets))

    dtype, on_cuda = compute_dtype(), device().type == "cuda"
    feeds = {name: FEEDS[name] for name in (BRAIN, BIG_BRAIN, BALANCED)}
    for variant in VARIANTS if on_cuda else ("dense", "varlen"):
        if not missing_because(variant, device(), dtype):
            feeds[f"packed, {variant}"] = partial(packed_batches, variant=variant)
    length, count = float(dataset.lengths.mean()), BATCHES if on_cuda else BATCHES // 2

    def first_batches(name: str, size: int) -> list[Batch]:
        epochs, _ = feeds[name](dataset, size, device(), dtype, 0)
        return list(itertools.islice(epochs(0), count))

    balanced = first_batches(BALANCED, batch_size)
    per_step = np.mean([batch.real for batch in balanced])
    size = max(round(per_step / (length - 1)), 1) if on_cuda else batch_size
    batches = {NO_PADDING: [full_batch(samples, size, round(length), device())]}
    batches |= {name: balanced if name == BALANCED else first_batches(name, size) for name in feeds}
    real_tokens = {name: np.mean([int((b.targets != 0).sum()) for b in of]) for name, of in batches.items()}
    batches["packed, dense"] = batches["packed, dense"][:DENSE_BATCHES]
    batches[BRAIN] = batches[BRAIN][:1]
    names = list(batches)
    for name in reversed(names):  # the largest last, when all masks are there
        if not fits(step, batches[name]):
            del batches[name]
    rows = rates(step, batches, real_tokens, rounds)
    limit = rows.get(NO_PADDING)
    for row in rows.values():
        row["ratio_to_no_padding"] = row["real_tokens_per_s"] / limit["real_tokens_per_s"] if limit else None
    origin = {"dtype": dtype_name(), "source": samples.source, "baseline": NO_PADDING}
    return [{"variant": name} | rows.get(name, {STATUS: OUT_OF_MEMORY}) | origin for name in names]


def _trainings(seeds: int, *sizes: float) -> list[Row]:
    of_run = dict(zip(TRAINING.split(), sizes, strict=True))
    return [{"data": data} | of_run | {"seed": seed} for data in DATA for seed in range(seeds)]


@experiment(
    small=_trainings(1, 32, 1, 500, 48, MAX_LENGTH, 8, 1, 3e-3),
    cpu=_trainings(3, 128, 2, 2048, 1200, MAX_LENGTH, 8, 1, 3e-3),
    gpu=_trainings(3, 256, 4, 8192, 10_000, MAX_LENGTH, 16, 1, 1e-3),
    big_gpu=_trainings(3, 512, 6, 24_725, 20_000, MAX_LENGTH, 64, 1, 3e-4),
    version=3,
    columns="train_s peak_gib validation_loss validation_accuracy guess_loss guess_accuracy steps real_tokens source",
    worth=Worth(20, "a whole training by batching", cpu=23.3, gpu=10, big_gpu=8, on_gpu=8),
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

    On WikiText where it is on the machine, with its most frequent words alone, else on generated text. All see the same
    samples; so at the end of an epoch all have seen as many real tokens. `guess_accuracy` is that of always guessing
    the most frequent token, `guess_loss` that of the tokens' frequencies. On a CPU `peak_gib` is that of a step on the
    widest batch.
    """
    texts = open_texts(path := wikitext_of(samples), samples, max(samples // 8, 1), words)
    trained, validation = frequent_words(texts, words) if path else texts
    shape = {"d_model": width, "num_heads": max(width // 64, 1)}
    sizes = {"shape": (shape, shape), "layers": layers, "max_length": max_length, "dropout": 0.0, "tied": True}
    sizes |= {"batch_size": batch_size, "learning_rate": learning_rate}
    real_tokens = int((np.minimum(trained.lengths, max_length + 1) - 1).sum())
    with PeakAbove() as peak:
        task = text_task(sizes, (trained, validation), device(), seed, DATA[data], half_dtype())
        if data == BY_TOKENS:  # a batch of headings has few, and a loss that is their mean
            mean, loss = real_tokens / task.steps(0), task.loss
            task = replace(task, loss=lambda logits, batch: loss(logits, batch) * (batch.real / mean))
        trainer = Trainer(task, Precision() if compute_dtype() == torch.float32 else mixed_precision())
        with trainer.settings():
            scores = fit(trainer, epochs=epochs)
    peak_gib = peak.gib
    if device().type == "cpu":
        widest = max(task.batches(0), key=lambda batch: batch.inputs.numel())
        with trainer.settings():
            peak_gib = peak_memory(lambda: trainer.step(widest)).peak_gib
    return {
        "train_s": scores["epoch_s"],
        "peak_gib": peak_gib,
        "validation_loss": scores["validation_loss"],
        "validation_accuracy": scores["validation_accuracy"],
        **guess_scores(task),
        "steps": scores["steps"],
        "real_tokens": real_tokens * epochs,
        "source": trained.source,
    }
