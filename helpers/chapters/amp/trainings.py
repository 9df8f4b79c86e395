"""The trainings of chapter 1: two tasks, each in several precisions and sizes."""

from collections.abc import Iterable

import torch
from torch import Tensor

from ...lab import Row
from ...text import local_wikitext
from ...train import PRECISIONS, Setup

TASKS = {"segmentation": "segmentation", "lm": "language model"}
RUNS = {
    "fp32": "fp32",
    "fp16": "pure fp16",
    "amp": "AMP, no scaler",
    "static": "AMP, static scale",
    "dynamic": "AMP, dynamic scale",
    "torch-scaler": "AMP, torch's scaler",
    "bf16": "AMP, bf16",
}
TIMED = ("fp32", "fp16", "amp", "static", "dynamic", "bf16")  # torch's scaler takes what ours does
BOTH, SEEDS = tuple(TASKS), range(3)
# The step whose gradients are looked at: those of the first ones are larger than what follows.
LOOKED_AT = {"small": 2, "reduced": 20, "full": 20}
EPOCHS = {"small": 1, "reduced": 4, "long": 5, "full": 5}  # of the pictures; the language model's training has one
# Good steps until the dynamic scale doubles; the usual 2000 steps are longer than these runs.
GROWTH_INTERVAL = {"small": 50, "reduced": 5, "long": 50, "full": 50}


def runs(size: str, precisions: Iterable[str], tasks: Iterable[str] = BOTH, **more: object) -> list[Row]:
    return [{"task": task, "precision": p, "size": size} | more for task in tasks for p in precisions]


SMALL_RUNS, FULL_RUNS = runs("small", ("fp32", "amp", "dynamic")), runs("full", PRECISIONS)
# For a CPU or a GPU of 8 GB: the pictures as long as they need for the accuracy that the task asks for
LONG_RUNS = runs("long", PRECISIONS, ["segmentation"]) + runs("reduced", PRECISIONS, ["lm"])


def training_setup(task: str, precision: str, size: str, seed: int = 0, autocast: str = "ours") -> Setup:
    """A training; on a CPU with what is there of WikiText, if it is."""
    epochs = EPOCHS[size] if task == "segmentation" else 1
    path = local_wikitext() if task == "lm" and size != "small" else None
    run = {"epochs": epochs, "growth_interval": GROWTH_INTERVAL[size], "path": path, "seed": seed}
    return Setup(task=task, precision=precision, autocast=autocast, preset=size, **run)


def zero_share(grads: list[Tensor]) -> Tensor:
    """The share of all their values that is exactly zero."""
    return torch.stack([(g == 0).sum() for g in grads]).sum() / sum(g.numel() for g in grads)


class LookedAt(Exception):
    """Ends a run that was only looked at."""
