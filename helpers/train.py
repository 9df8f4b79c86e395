"""Train a task in a chosen precision, with a checkpoint to resume from: what chapters 1 and 2 share.

dlspeed train --task segmentation --precision dynamic --epochs 5 --seed 0
dlspeed train --stages "mixed precision,batching" --epochs 1      # chapter 0: `helpers.training.stages`
>>> from helpers.train import Setup, train
>>> train(Setup(task="lm", precision="bf16", preset="small"))

The same setup gives the same run. A checkpoint holds the model, the optimizer, the scaler, the state of the random
number generators and the number of steps done, so a resumed run equals an uninterrupted one (on a GPU as far as its
kernels are deterministic).
"""

import math
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from helpers.lab import device
from helpers.lab.files import check_writable, replacing
from helpers.training.cars import segmentation_task
from helpers.training.language import language_task
from helpers.training.loop import Excerpt, OnStep, Step, fit
from helpers.training.text_batches import DATA
from helpers.training.trainer import AUTOCASTS, PRECISIONS, Precision, Task, Trainer

__all__ = ["DATA", "PRECISIONS", "Setup", "Step", "build", "build_task", "train"]

TASKS = {"lm": language_task, "segmentation": segmentation_task}
SIZES = ("small", "reduced", "full")


@dataclass(frozen=True, kw_only=True)
class Setup:
    """One training run."""

    task: str = "lm"
    precision: str = "dynamic"
    autocast: str = "ours"
    data: str = "standard"  # how batches of text are made
    preset: str = "small"
    epochs: int = 5
    seed: int = 0
    clip: float | None = None
    growth_interval: int = 50  # of the dynamic scale; the usual 2000 steps are longer than a run of a few epochs
    path: Path | None = None
    checkpoint: Path | None = None

    def __post_init__(self) -> None:
        for name, valid in (
            ("task", TASKS),
            ("precision", PRECISIONS),
            ("autocast", AUTOCASTS),
            ("data", DATA),
            ("preset", SIZES),
        ):
            if getattr(self, name) not in valid:
                raise ValueError(f"unknown {name} {getattr(self, name)!r}; valid: {', '.join(valid)}")
        if self.task != "lm" and self.data != "standard":
            raise ValueError(f"data is {self.data!r}, which is for text; {self.task} has 'standard' only")
        if self.epochs < 1:
            raise ValueError(f"epochs is {self.epochs}; it must be at least 1")
        if self.seed < 0:
            raise ValueError(f"seed is {self.seed}; it must be at least 0")
        if self.clip is not None and not self.clip > 0:
            raise ValueError(f"clip is {self.clip}; it must be above 0")

    def in_precision(self) -> Precision:
        return Precision(self.precision, self.autocast, self.growth_interval)


def train(
    setup: Setup, *, on_step: OnStep | None = None, progress: bool = True, stop_after: int | None = None
) -> dict[str, Any]:
    """Train; returns the setup, the scores of each epoch and of the last, and seconds. `on_step`: see `fit`.

    `stop_after` ends the run after so many steps and writes its checkpoint, as if it had been killed. Precision "fp32"
    disables TF32 for the duration of the run.
    """
    if setup.checkpoint is not None:
        check_writable(setup.checkpoint.parent)
    trainer = build(setup)
    step, epochs = 0, []
    if setup.checkpoint is not None and setup.checkpoint.exists():
        step, epochs = _load(setup, trainer)

    def save(done: int, loss: torch.Tensor, scores: dict[str, float]) -> None:
        if scores:
            epochs.append({"train_loss": float(loss)} | {f"validation_{name}": scores[name] for name in scores})
        if setup.checkpoint is not None:
            _save(setup, trainer, done, epochs)

    began = time.perf_counter()
    with trainer.settings():
        excerpt = Excerpt(stop_after)
        done = fit(
            trainer, epochs=setup.epochs, excerpt=excerpt, start=step, on_step=on_step, on_stop=save, progress=progress
        )
    scaler, last = trainer.scaler, epochs[-1] if epochs else {}
    return {
        "setup": {name: str(value) if isinstance(value, Path) else value for name, value in asdict(setup).items()},
        "source": trainer.task.source,
        "steps": done["steps"],
        "skipped_steps": scaler.skipped_steps() if hasattr(scaler, "skipped_steps") else None,
        "scale": scaler.get_scale() if scaler is not None else None,
        "epochs": epochs,
        "diverged": not all(math.isfinite(value) for scores in epochs for value in scores.values()),
        "seconds": time.perf_counter() - began,
    } | last


def build(setup: Setup) -> Trainer:
    """The trainer of a setup, before its first step, on `device()`."""
    return Trainer(build_task(setup, device()), setup.in_precision(), clip=setup.clip)


def build_task(setup: Setup, where: torch.device) -> Task:
    """The task of a setup, its model on the device `where`."""
    options = {"data": setup.data, "dtype": setup.in_precision().dtype} if setup.task == "lm" else {}
    return TASKS[setup.task](setup.preset, setup.path, where, setup.seed, **options)


def _save(setup: Setup, trainer: Trainer, step: int, epochs: list[dict[str, float]]) -> None:
    """Write the checkpoint completely or not at all."""
    state = {
        "setup": _identity(setup),
        "model": trainer.model.state_dict(),
        "optimizer": trainer.optimizer.state_dict(),
        "scaler": None if trainer.scaler is None else trainer.scaler.state_dict(),
        "random": torch.get_rng_state(),
        "cuda_random": torch.cuda.get_rng_state_all() if trainer.device.type == "cuda" else [],
        "step": step,
        "epochs": epochs,
    }
    with replacing(setup.checkpoint) as stream:
        torch.save(state, stream)


def _load(setup: Setup, trainer: Trainer) -> tuple[int, list[dict[str, float]]]:
    try:
        state = torch.load(setup.checkpoint, map_location="cpu", weights_only=True)
    except Exception as error:
        raise ValueError(f"{setup.checkpoint}: not a checkpoint that can be read; delete it to start anew") from error
    if state["setup"] != _identity(setup):
        differing = sorted(n for n, value in _identity(setup).items() if state["setup"].get(n) != value)
        raise ValueError(f"{setup.checkpoint}: a checkpoint of another run; it differs in {', '.join(differing)}")
    trainer.model.load_state_dict(state["model"])
    trainer.optimizer.load_state_dict(state["optimizer"])
    if trainer.scaler is not None:
        trainer.scaler.load_state_dict(state["scaler"])
    torch.set_rng_state(state["random"])
    if state["cuda_random"]:
        torch.cuda.set_rng_state_all(state["cuda_random"])
    return state["step"], state["epochs"]


def _identity(setup: Setup) -> dict[str, Any]:
    """The fields that must agree to resume from a checkpoint; `epochs` may be raised."""
    return {name: getattr(setup, name) for name in ("task", "precision", "autocast", "data", "preset", "seed", "clip")}
