"""Whole trainings on each kind of batches: time, memory, and what was learned."""

import math
from collections.abc import Iterable
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pandas as pd
import torch

from ...batching.attention import without_cudnn_attention
from ...book.table import Worth, table
from ...book.values import PERCENT, Number, cost, derived, lacking, marked, mean_of, over_runs
from ...lab import Row, device, half_dtype, peak_memory
from ...lab.memory import PeakAbove
from ...rush.rates import recorded_rates
from ...training.language import frequent_words, guess_scores, open_texts, text_task
from ...training.loop import fit
from ...training.task import Precision, TaskTrainer, mixed_precision
from ..swiglu.ceilings import ceilings
from .feeds import BALANCED, BIG_BRAIN, BRAIN, PACKED, STEPS
from .inputs import MAX_LENGTH, compute_dtype, wikitext_of
from .throughput import VARLEN, throughput

NAMED_STEPS = {"longest": BIG_BRAIN, "balanced": BALANCED, "packed": PACKED}
BY_TOKENS = f"{BALANCED}, every token alike"
WEIGHTED = f"{BALANCED}, loss by tokens"  # the same, in rows whose loss of validation was weighted, too: it is left out
DATA = dict(zip(STEPS, ("base", "standard", "balanced", "sequenced"), strict=True)) | {BY_TOKENS: "balanced"}
OTHERS = {"k = 1": "within 1", "k = 50": "within 50"}
TRAINING = "width layers words samples max_length batch_size epochs learning_rate"


def _trainings(seeds: int, *sizes: float, others: Iterable[str] = ()) -> list[Row]:
    of_run = dict(zip(TRAINING.split(), sizes, strict=True))
    return [{"data": data} | of_run | {"seed": seed} for data in (*DATA, *others) for seed in range(seeds)]


@table(
    small=_trainings(1, 32, 1, 500, 48, MAX_LENGTH, 8, 1, 3e-3),
    cpu=_trainings(3, 128, 2, 2048, 1200, MAX_LENGTH, 8, 4, 3e-3, others=OTHERS),
    gpu=_trainings(3, 256, 4, 8192, 10_000, MAX_LENGTH, 16, 1, 1e-3),
    big_gpu=_trainings(3, 512, 6, 24_725, 20_000, MAX_LENGTH, 64, 1, 3e-4),
    version=3,
    columns="train_s peak_gib validation_loss validation_accuracy guess_loss guess_accuracy steps real_tokens source",
    worth=Worth(20, "a whole training by batching", cpu=57, gpu=10, big_gpu=8, on_gpu=8),
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
    the most frequent token, `guess_loss` that of the tokens' frequencies. `train_s` is the last epoch's; on a CPU
    `peak_gib` is that of a step on the widest batch.
    """
    texts = open_texts(path := wikitext_of(samples), samples, max(samples // 8, 1), words)
    trained, validation = frequent_words(texts, words) if path else texts
    shape = {"d_model": width, "num_heads": max(width // 64, 1)}
    sizes = {"shape": (shape, shape), "layers": layers, "max_length": max_length, "dropout": 0.0, "tied": True}
    sizes |= {"batch_size": batch_size, "learning_rate": learning_rate}
    real_tokens = int((np.minimum(trained.lengths, max_length + 1) - 1).sum())
    with PeakAbove() as peak:
        task = text_task(sizes, (trained, validation), device(), seed, (DATA | OTHERS)[data], half_dtype())
        if data == BY_TOKENS:  # a batch of headings has few, and a loss that is their mean
            mean, loss = real_tokens / task.steps(0), task.loss
            task = replace(task, loss=lambda logits, batch: loss(logits, batch) * _weight(logits, batch.real / mean))
        trainer = TaskTrainer(task, Precision() if compute_dtype() == torch.float32 else mixed_precision())
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


def _weight(logits: torch.Tensor, share: float) -> float:
    """Of a batch's loss; the loss of validation, which has no gradients, stays as it is."""
    return share if logits.requires_grad else 1.0


# Numbers


@training.numbers(beside=[ceilings, throughput])
def _(rows: pd.DataFrame, ceilings: pd.DataFrame, steps: pd.DataFrame) -> SimpleNamespace:
    """Whole trainings on each kind of batches: means over the seeds, and what they cost against random batches.

    `each` has what a step of them takes, beside its products at the measured rate in the type of `throughput`'s packs.
    """
    metrics = ["steps", "train_s", "peak_mib", "validation_loss", "guess_loss", "validation_accuracy", "guess_accuracy"]
    rows = rows.reindex(columns=rows.columns.union(["noisy"], sort=False))
    rows["validation_loss"] = rows["validation_loss"].mask(rows["data"] == WEIGHTED)
    groups = rows.assign(peak_mib=1024 * rows["peak_gib"]).groupby("data", sort=False)
    shown = groups[metrics].mean().assign(std=groups["validation_loss"].std())
    shown = shown[[*metrics[:4], "std", *metrics[4:]]].rename(columns={"std": "loss, std"})
    noisy = groups["noisy"].agg(lambda why: "; ".join(filter(None, why.fillna("").astype(str))))
    shown["train_s"] = [marked(value, {"noisy": why}) for value, why in zip(shown["train_s"], noisy, strict=True)]
    shown.columns = [name.removeprefix("validation_").replace("guess_", "guess ") for name in shown]
    shown = shown.rename(columns={"train_s": "last epoch, s" if rows["epochs"].iloc[0] > 1 else "train, s"})
    losses, seconds = (
        rows.pivot(index="seed", columns="data", values=name).reindex(columns=STEPS)
        for name in ("validation_loss", "train_s")
    )

    def faster(data: str, baseline: str) -> Number:
        marks = any(noisy.get(name) for name in (data, baseline))
        return replace(over_runs(seconds[baseline], seconds[data]), noisy=marks)

    accuracy = rows.replace({"data": {WEIGHTED: BY_TOKENS}}).groupby("data")["validation_accuracy"].mean()
    first, seeds = rows.iloc[0], rows["seed"].nunique()
    source = first["source"].partition(",")[0]
    return SimpleNamespace(
        table=shown.dropna(axis="columns", how="all").reset_index(),  # one seed has no deviation
        sizes=f"{seeds} seed{'s' * (seeds > 1)}, {first['real_tokens']:,} real tokens of {source}, "
        f"width {first['width']}, batches of {first['batch_size']}, samples cut to {first['max_length']} tokens",
        batch=int(first["batch_size"]),
        epochs=int(first["epochs"]),
        packed_speedup=faster(PACKED, BRAIN),
        packed_over_longest=faster(PACKED, BIG_BRAIN),
        took={data: Number(seconds[data].mean(), "s", missing=data, decimals=1) for data in STEPS},
        balanced_speedup=faster(BALANCED, BRAIN),
        balanced_over_longest=faster(BALANCED, BIG_BRAIN),
        **{
            f"{name}_gap": _gap(losses[data] - losses[BIG_BRAIN], data)
            for name, data in (("balanced", BALANCED), ("packed", PACKED))
        },
        accuracy={data: Number(accuracy.get(data, math.nan), PERCENT, missing=data, decimals=1) for data in DATA},
        each=_steps(rows, ceilings, steps),
        cost=SimpleNamespace(balanced=_cost(rows, BALANCED), packed=_cost(rows, PACKED)),
    )


def _gap(differences: pd.Series, data: str) -> Number:
    """By how much the losses of the same seeds differ; one seed has no interval."""
    one = Number(differences.mean(), "nats", missing=data, decimals=2)
    return mean_of(differences, "nats", data) if differences.count() > 1 else one


def _steps(rows: pd.DataFrame, ceilings: pd.DataFrame, others: pd.DataFrame) -> SimpleNamespace:
    """An epoch's time by its steps; `least_ms` is that of a packed one's matrix products, at the measured rate."""
    epochs = rows[rows["seed"] == rows["seed"].min()].set_index("data")
    ms = 1e3 * epochs["train_s"] * epochs["epochs"] / epochs["steps"]
    first = epochs.loc[PACKED] if PACKED in epochs.index else epochs.iloc[0]
    tokens = first["real_tokens"] / first["steps"]
    weights = 12 * first["layers"] * first["width"] ** 2 + first["words"] * first["width"]
    packs = others[others["variant"] == VARLEN] if len(others) else others
    rates = recorded_rates(ceilings) if len(ceilings) else {}
    tflops = max((rates.get(dtype, 0.0) for dtype in packs.get("dtype", [])), default=0.0)
    least_ms = 6e-9 * weights * tokens / (tflops or math.nan)
    no_rate = lacking("the rate of a large matrix product", "ms")
    return SimpleNamespace(
        **{name: Number(ms.get(kind, math.nan), "ms", missing=kind) for name, kind in NAMED_STEPS.items()},
        least_ms=derived(least_ms, "operations at the measured rate", "ms") if tflops else no_rate,
        share=Number(least_ms / ms.get(PACKED, math.nan), PERCENT, decimals=0, missing="a packed step and its rate"),
    )


def _cost(rows: pd.DataFrame, data: str) -> tuple[Number, Number]:
    """Peak and loss against padding to the longest; no loss where that is above what frequencies alone guess."""
    peak, loss = cost(rows, "data", data, BIG_BRAIN)
    learned = rows[rows["data"] == BIG_BRAIN]
    above = learned["validation_loss"].mean() > learned["guess_loss"].mean()
    return peak, lacking("a training that learns more than frequencies") if above else loss
