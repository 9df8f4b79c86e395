"""Train a task in a chosen precision: what chapters 1 to 3 share.

    python -m helpers train --task segmentation --precision dynamic --epochs 5 --seed 0
    python -m helpers train --stages "mixed precision,batching" --epochs 1      # chapter 0: `helpers.summary.run`
    >>> from helpers.train import Setup, train
    >>> train(Setup(task="lm", precision="bf16", preset="small"))

The same setup gives the same run. A checkpoint holds the model, the optimizer, the scaler, the random numbers' state
and how far the run is, so that a run that was stopped goes on exactly as if it hadn't been (on a GPU as far as its
kernels are deterministic).
"""

import bisect
import contextlib
import itertools
import math
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from tqdm import tqdm

from helpers.amp import Autocast, DynamicGradScaler, StaticGradScaler
from helpers.batching.attention import without_cudnn_attention
from helpers.lab import device
from helpers.lab.files import replacing
from helpers.lab.precision import fp32_products
from helpers.tasks import DATA, TASKS, Batch, Task

# `fp32` is fp32 in products and convolutions, too, not TF32. `fp16` is a model in pure fp16, without autocast or
# scaler. The others are autocast: `bf16`, `amp` in fp16 without a scaler, and fp16 with the scaler that they name.
PRECISIONS = ("fp32", "fp16", "bf16", "amp", "static", "dynamic", "torch-scaler")
AUTOCASTS = ("ours", "torch")
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
    growth_interval: int = 50  # of the dynamic scale: 2000, the usual patience, outlasts a run of a few epochs
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
            raise ValueError(f"data is {self.data!r}, a way to batch text; {self.task} has 'standard' only")
        if self.epochs < 1:
            raise ValueError(f"epochs is {self.epochs}; it must be at least 1")
        if self.seed < 0:
            raise ValueError(f"seed is {self.seed}; it must be at least 0")
        if self.clip is not None and not self.clip > 0:
            raise ValueError(f"clip is {self.clip}; it must be above 0")


@dataclass(frozen=True)
class Step:
    """What a step leaves to look at, before its gradients go: tensors on the device, nothing is read."""

    number: int
    loss: Tensor
    model: nn.Module
    scaler: Any


def train(
    setup: Setup, *, on_step: Callable[[Step], None] | None = None, progress: bool = True, stop_after: int | None = None
) -> dict[str, Any]:
    """Train, and return what came of it. `on_step` looks at gradients, still scaled, before each step.

    `stop_after` ends the run after so many steps, with its checkpoint written, as a kill would. In precision "fp32" a
    GPU computes products and convolutions in fp32, not in TF32, for as long as the run lasts.
    """
    with kernels(setup):
        return _train(setup, on_step, progress, stop_after)


def _train(setup, on_step, progress: bool, stop_after: int | None) -> dict[str, Any]:
    where = device()
    task = build_task(setup, where)
    model = task.model.half() if setup.precision == "fp16" else task.model
    optimizer = build_optimizer(setup, model, task.learning_rate)
    scaler = build_scaler(setup, where)
    step, epochs = 0, []
    if setup.checkpoint is not None and setup.checkpoint.exists():
        step, epochs = _load(setup, model, optimizer, scaler)
    ends = list(itertools.accumulate(task.steps(epoch) for epoch in range(setup.epochs)))
    began = time.perf_counter()
    with tqdm(total=ends[-1], initial=step, unit="step", file=sys.stderr, disable=not progress) as bar:
        while step < ends[-1] and step != stop_after:
            epoch = bisect.bisect_right(ends, step)
            for batch in task.batches(epoch, step - (ends[epoch] - task.steps(epoch))):
                loss = _train_step(setup, task, model, optimizer, scaler, batch, step, on_step)
                step += 1
                bar.update()
                if step == stop_after:
                    break
            if step == ends[epoch]:
                epochs.append({"train_loss": float(loss)} | evaluate(setup, task, model))
                bar.set_postfix({name: f"{value:.4f}" for name, value in epochs[-1].items()})
            _save(setup, model, optimizer, scaler, step, epochs)
    finite = all(math.isfinite(value) for found in epochs for value in found.values())
    return {
        "setup": {name: str(value) if isinstance(value, Path) else value for name, value in asdict(setup).items()},
        "source": task.source,
        "steps": step,
        "skipped_steps": scaler.skipped_steps() if hasattr(scaler, "skipped_steps") else None,
        "scale": scaler.get_scale() if scaler is not None else None,
        "epochs": epochs,
        "diverged": not finite,
        "seconds": time.perf_counter() - began,
    } | (epochs[-1] if epochs else {})


@contextlib.contextmanager
def kernels(setup: Setup) -> Iterator[None]:
    """Around forward and backward: fp32 is fp32 inside products and convolutions too, and text may be of any length."""
    with without_cudnn_attention(), fp32_products() if setup.precision == "fp32" else contextlib.nullcontext():
        yield


def build_optimizer(setup: Setup, model: nn.Module, learning_rate: float) -> torch.optim.Optimizer:
    """AdamW in one kernel; for a model in pure fp16 in a few that compute in fp16, as the rest of its training does."""
    kernels = {"foreach": True} if setup.precision == "fp16" else {"fused": True}
    return torch.optim.AdamW(model.parameters(), lr=learning_rate, **kernels)


def build_scaler(setup: Setup, where: torch.device) -> Any:
    """The scaler of a precision; None for those that have none."""
    if setup.precision == "static":
        return StaticGradScaler()
    if setup.precision == "dynamic":
        return DynamicGradScaler(growth_interval=setup.growth_interval)
    if setup.precision == "torch-scaler":
        return torch.amp.GradScaler(where.type, growth_interval=setup.growth_interval)
    return None


def autocast(setup: Setup) -> contextlib.AbstractContextManager:
    """The autocast region of a setup: nothing for fp32 and pure fp16."""
    if setup.precision in ("fp32", "fp16"):
        return contextlib.nullcontext()
    dtype = compute_dtype(setup)
    if setup.autocast == "torch":
        return torch.autocast(device().type, dtype=dtype)
    return Autocast(dtype=dtype, device_type=device().type)


def build_task(setup: Setup, where: torch.device) -> Task:
    """The task of a setup, its model on the device `where`."""
    options = {"data": setup.data, "dtype": compute_dtype(setup)} if setup.task == "lm" else {}
    return TASKS[setup.task](setup.preset, setup.path, where, setup.seed, **options)


def compute_dtype(setup: Setup) -> torch.dtype:
    """The type that matrix products are computed in."""
    if setup.precision == "fp32":
        return torch.float32
    return torch.bfloat16 if setup.precision == "bf16" else torch.float16


def forward(setup: Setup, task: Task, model: nn.Module, batch: Batch) -> tuple[Tensor, Tensor]:
    """Loss and output of a batch."""
    inputs, targets = batch.inputs, batch.targets
    if setup.precision == "fp16":
        inputs, targets = (part.half() if part.is_floating_point() else part for part in (inputs, targets))
    with autocast(setup):
        output = model(inputs, **batch.options)
        return task.loss(output, targets), output


@torch.no_grad()
def evaluate(setup: Setup, task: Task, model: nn.Module) -> dict[str, float]:
    """Accuracy and loss on the validation split, in the precision of training; batches count by their rows."""
    model.eval()
    task.accuracy.reset()
    losses, rows = [], 0
    for batch in task.validation():
        loss, output = forward(setup, task, model, batch)
        task.accuracy.update(output, batch.targets)
        losses.append(loss.float() * len(batch.inputs))
        rows += len(batch.inputs)
    model.train()
    return {"validation_loss": float(torch.stack(losses).sum() / rows), "validation_accuracy": task.accuracy.compute()}


def _train_step(setup, task, model, optimizer, scaler, batch, number, on_step) -> Tensor:
    optimizer.zero_grad()
    loss, _ = forward(setup, task, model, batch)
    (loss if scaler is None else scaler.scale(loss)).backward()
    if on_step is not None:
        on_step(Step(number, loss.detach(), model, scaler))
    if setup.clip is not None:
        _clip(setup, model, optimizer, scaler)
    if scaler is None:
        optimizer.step()
    else:
        scaler.step(optimizer)
        scaler.update()
    return loss.detach()


def _clip(setup, model, optimizer, scaler) -> None:
    if hasattr(scaler, "clip_grad_norm_"):
        scaler.clip_grad_norm_(optimizer, setup.clip)
        return
    if scaler is not None:
        scaler.unscale_(optimizer)
    torch.nn.utils.clip_grad_norm_(model.parameters(), setup.clip)


def _save(setup, model, optimizer, scaler, step: int, epochs: list[dict]) -> None:
    """Write the checkpoint whole or not at all."""
    if setup.checkpoint is None:
        return
    state = {
        "setup": _identity(setup),
        "model": model.state_dict(),
        "optimizer": optimizer.state_dict(),
        "scaler": None if scaler is None else scaler.state_dict(),
        "random": torch.get_rng_state(),
        "cuda_random": torch.cuda.get_rng_state_all() if device().type == "cuda" else [],
        "step": step,
        "epochs": epochs,
    }
    with replacing(setup.checkpoint) as stream:
        torch.save(state, stream)


def _load(setup, model, optimizer, scaler) -> tuple[int, list[dict]]:
    try:
        state = torch.load(setup.checkpoint, map_location="cpu", weights_only=True)
    except Exception as error:
        raise ValueError(f"{setup.checkpoint}: not a checkpoint that can be read; delete it to start anew") from error
    if state["setup"] != _identity(setup):
        differing = sorted(n for n, value in _identity(setup).items() if state["setup"].get(n) != value)
        raise ValueError(f"{setup.checkpoint}: a checkpoint of another run; it differs in {', '.join(differing)}")
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    if scaler is not None:
        scaler.load_state_dict(state["scaler"])
    torch.set_rng_state(state["random"])
    if state["cuda_random"]:
        torch.cuda.set_rng_state_all(state["cuda_random"])
    return state["step"], state["epochs"]


def _identity(setup: Setup) -> dict[str, Any]:
    """What must agree for a checkpoint to be gone on with; a run may be made longer."""
    return {name: getattr(setup, name) for name in ("task", "precision", "autocast", "data", "preset", "seed", "clip")}
