"""Train a task in a chosen precision: what chapters 1 and 2 share.

dlspeed train --task segmentation --precision dynamic --epochs 5 --seed 0
dlspeed train --stages "mixed precision,batching" --epochs 1      # chapter 0: `helpers.training.stages`
>>> from helpers.train import Setup, train
>>> train(Setup(task="lm", precision="bf16", preset="small"))

The same setup gives the same run (on a GPU as far as its kernels are deterministic).
"""

import math
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from .lab import device
from .lab.arguments import check_at_least, check_choice
from .training import cars, language
from .training.loop import OnStep, Step, fit
from .training.task import PRECISIONS, Precision, Task, TaskTrainer
from .training.text_batches import DATA

__all__ = ["DATA", "PRECISIONS", "Setup", "Step", "build_task", "build_trainer", "train"]

TASKS = {"lm": language.language_task, "segmentation": cars.segmentation_task}
PRESETS = {"lm": language.SIZES, "segmentation": cars.SIZES}


@dataclass(frozen=True, kw_only=True)
class Setup:
    """One training run."""

    task: str = "lm"
    precision: str = "dynamic"
    autocast: str = "ours"  # or "torch"
    data: str = "standard"  # how batches of text are made
    preset: str = "small"
    epochs: int = 5
    seed: int = 0
    clip: float | None = None
    growth_interval: int = 50  # of the dynamic scale; the usual 2000 steps are longer than a run of a few epochs
    path: Path | None = None

    def __post_init__(self) -> None:
        check_choice(TASKS, task=self.task)
        check_choice(PRECISIONS, precision=self.precision)
        check_choice(("ours", "torch"), autocast=self.autocast)
        check_choice(DATA, data=self.data)
        check_choice(PRESETS[self.task], preset=self.preset)
        if self.task != "lm" and self.data != "standard":
            raise ValueError(f"data is {self.data!r}, which is for text; {self.task} has 'standard' only")
        check_at_least(1, epochs=self.epochs)
        check_at_least(0, seed=self.seed)
        if self.clip is not None and not self.clip > 0:
            raise ValueError(f"clip is {self.clip}; it must be above 0")

    def in_precision(self) -> Precision:
        return Precision(self.precision, self.autocast, self.growth_interval)


def train(setup: Setup, *, on_step: OnStep | None = None, progress: bool = True) -> dict[str, Any]:
    """Train; returns the setup, the scores of each epoch and of the last, and seconds. `on_step`: see `fit`.

    Precision "fp32" disables TF32 for the duration of the run.
    """
    trainer, epochs = build_trainer(setup), []

    def note(loss: torch.Tensor, scores: dict[str, float]) -> None:
        epochs.append({"train_loss": float(loss)} | {f"validation_{name}": scores[name] for name in scores})

    began = time.perf_counter()
    with trainer.settings():
        done = fit(trainer, epochs=setup.epochs, on_step=on_step, on_epoch=note, progress=progress)
    scaler, last = trainer.scaler, epochs[-1]
    return {
        "setup": {name: str(value) if isinstance(value, Path) else value for name, value in asdict(setup).items()},
        "source": trainer.task.source,
        "steps": done["steps"],
        "skipped_steps": scaler.skipped_steps() if hasattr(scaler, "skipped_steps") else None,
        "scale": float(scaler.scale(torch.ones(()))) if scaler is not None else None,
        "epochs": epochs,
        "diverged": not all(math.isfinite(value) for scores in epochs for value in scores.values()),
        "seconds": time.perf_counter() - began,
    } | last


def build_trainer(setup: Setup) -> TaskTrainer:
    """The trainer of a setup, before its first step, on `device()`."""
    return TaskTrainer(build_task(setup, device()), setup.in_precision(), clip=setup.clip)


def build_task(setup: Setup, where: torch.device) -> Task:
    """The task of a setup, its model on the device `where`."""
    options = {"data": setup.data, "dtype": setup.in_precision().dtype} if setup.task == "lm" else {}
    return TASKS[setup.task](setup.preset, setup.path, where, setup.seed, **options)
