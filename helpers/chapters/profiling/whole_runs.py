"""Trainings of whole epochs, slow and fixed: time, memory, and what was learned."""

import functools
from types import SimpleNamespace

import pandas as pd

from ...book import Worth
from ...book.table import table
from ...book.values import PERCENT, Number, over_runs, pick
from ...lab.rows import Row
from ..amp.quality import constant_accuracy
from .planted_faults import FIXED, NAMES, PIPELINES, SLOW, fixes_of, options, sized


def _runs(plan: dict[str, tuple[int, int]]) -> list[Row]:
    """Epochs and seeds by pipeline."""
    return [
        {"pipeline": pipeline, "variant": variant, "epochs": epochs, "seed": seed}
        for pipeline, (epochs, seeds) in plan.items()
        for seed in range(seeds)
        for variant in (SLOW, FIXED)
    ]


@table(
    small=sized("small", [{"pipeline": "vit", "variant": FIXED, "epochs": 1, "seed": 0}]),
    cpu=sized("cpu", _runs({"vit": (3, 3), "gpt": (2, 3)})),
    gpu=sized("gpu", _runs({"vit": (3, 2), "gpt": (1, 2)})),
    big_gpu=sized("full", _runs({"vit": (2, 2), "gpt": (1, 2)})),
    version=2,
    columns="epoch_s peak_gib? validation_accuracy train_loss steps source constant_accuracy",
    worth=Worth(
        30, "the slow training and the fixed one as wholes", cpu=15.7, gpu=10, big_gpu=17, headline={"seed": (0,)}
    ),
)
def whole_runs(size: str, pipeline: str, variant: str, epochs: int, seed: int) -> Row:
    """Training for whole epochs: seconds of the last one with its validation, and what was learned.

    `constant_accuracy` is that of always guessing training's commonest target.
    """
    switched, fixes = PIPELINES[pipeline], fixes_of(pipeline, variant, size)
    taken = {"epochs": epochs, "seed": seed} | options(switched, size)
    row = switched.run(fixes, **taken)
    names = ("epoch_s", "peak_gib", "validation_accuracy", "train_loss", "steps", "source")
    return {name: row[name] for name in names} | {"constant_accuracy": _constant_accuracy(pipeline, size)}


@functools.cache
def _constant_accuracy(pipeline: str, size: str) -> float:
    switched = PIPELINES[pipeline]
    return constant_accuracy(switched.prepare(switched.fixed - {"workers"}, **options(switched, size)).task)


# Numbers


@whole_runs.numbers()
def _(rows: pd.DataFrame) -> SimpleNamespace:
    """Trainings of the slow and the fixed loop: time of an epoch, and what was learned over the seeds."""
    groups = rows.groupby(["pipeline", "variant"], sort=False)
    means = groups.agg(
        seeds=("seed", "nunique"),
        epochs=("epochs", "first"),
        epoch_s=("epoch_s", "median"),
        train_loss=("train_loss", "mean"),
        accuracy=("validation_accuracy", "mean"),
        deviation=("validation_accuracy", "std"),
        guess=("constant_accuracy", "mean"),
    ).reset_index()
    names = {"pipeline": "model", "variant": "loop", "deviation": "accuracy, std", "guess": "constant guess"}
    return SimpleNamespace(
        table=means.replace({"pipeline": NAMES}).rename(columns=names),
        data="; ".join(rows["source"].drop_duplicates()),
        vit=_training(rows, means, "vit"),
        gpt=_training(rows, means, "gpt"),
    )


def _training(rows: pd.DataFrame, means: pd.DataFrame, pipeline: str) -> SimpleNamespace:
    loops = [{"pipeline": pipeline, "variant": variant} for variant in ("slow", "fixed")]
    seeds = rows[rows["pipeline"] == pipeline].pivot_table(index="seed", columns="variant", values="epoch_s")
    seeds = seeds.reindex(columns=["slow", "fixed"])
    slow_s, fixed_s = (pick(means, "epoch_s", "s", 1, **loop) for loop in loops)
    slow, fixed = (pick(means, "accuracy", PERCENT, 1, **loop) for loop in loops)
    return SimpleNamespace(
        slow_s=slow_s,
        fixed_s=fixed_s,
        speedup=over_runs(seeds["slow"], seeds["fixed"]),
        points=Number(100 * (fixed.value - slow.value), "points", decimals=1),
    )
