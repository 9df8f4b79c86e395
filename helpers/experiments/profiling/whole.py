"""Trainings of whole epochs."""

import functools

from ...lab import Worth, experiment
from ...lab.records import Row
from ..amp.trainings import constant_accuracy
from .planted_faults import FIXED, PIPELINES, SLOW, fixes_of, options
from .two_loops import sized


def _runs(plan: dict[str, tuple[int, int]]) -> list[Row]:
    """Epochs and seeds by pipeline."""
    return [
        {"pipeline": pipeline, "variant": variant, "epochs": epochs, "seed": seed}
        for pipeline, (epochs, seeds) in plan.items()
        for seed in range(seeds)
        for variant in (SLOW, FIXED)
    ]


@experiment(
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
