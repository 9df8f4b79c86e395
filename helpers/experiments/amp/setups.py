"""The trainings of chapter 1: two tasks, each in several precisions and sizes."""

from collections.abc import Iterable

from ...lab.records import Row
from ...text import local_wikitext
from ...train import PRECISIONS, Setup

BOTH, SEEDS = ("segmentation", "lm"), range(3)
EPOCHS = {"small": 1, "reduced": 4, "long": 5, "full": 5}  # of the pictures; the language model's training has one
# Good steps until the dynamic scale doubles; the usual 2000 steps are longer than these runs.
GROWTH_INTERVAL = {"small": 50, "reduced": 5, "long": 50, "full": 50}


def runs(size: str, precisions: Iterable[str], tasks: Iterable[str] = BOTH, **more: object) -> list[Row]:
    return [{"task": task, "precision": p, "size": size} | more for task in tasks for p in precisions]


SMALL_RUNS, FULL_RUNS = runs("small", ("fp32", "amp", "dynamic")), runs("full", PRECISIONS)
# For a CPU or a GPU of 8 GB: the pictures as long as they need for the accuracy that the task asks for
LONG_RUNS = runs("long", PRECISIONS, ["segmentation"]) + runs("reduced", PRECISIONS, ["lm"])


def training_setup(task: str, precision: str, size: str, seed: int = 0) -> Setup:
    """A training; on a CPU with what is there of WikiText, if it is."""
    epochs = EPOCHS[size] if task == "segmentation" else 1
    path = local_wikitext() if task == "lm" and size != "small" else None
    run = {"epochs": epochs, "growth_interval": GROWTH_INTERVAL[size], "path": path, "seed": seed}
    return Setup(task=task, precision=precision, preset=size, **run)
