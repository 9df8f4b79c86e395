"""The training loop: epochs, steps, validation, timing, and a profiler around it.

Its traces have the ranges "load" and "validation", besides those of a step that `TaskTrainer` names.
"""

import contextlib
import itertools
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from torch.profiler import record_function
from tqdm import tqdm

from ..lab import Timing
from ..lab.timing import between_ms, moment, synchronize
from .task import TaskTrainer

SETTLING = 5  # warm-up steps, not timed: start of workers, choice of kernels, compilation, recording


@dataclass(frozen=True)
class Step:
    """What `on_step` gets: the loss, on the device, and the model with its gradients."""

    number: int
    loss: Tensor
    model: nn.Module
    scaler: Any


OnStep = Callable[[Step], Any]
Profile = Callable[[nn.Module], contextlib.AbstractContextManager]


def fit(
    trainer: TaskTrainer,
    *,
    epochs: int,
    steps: int | None = None,
    settling: int = SETTLING,
    validates: bool = True,
    on_step: OnStep | None = None,
    on_epoch: Callable[[Tensor, dict[str, float]], Any] | None = None,
    profile: Profile | None = None,
    progress: bool = False,
) -> dict[str, Any]:
    """Train and validate, epoch by epoch; call it inside `trainer.settings()`. Returns times and scores.

    With `steps` the training ends after so many, with a validation if it `validates`. The first `settling` steps are
    not timed. `on_step` is called before each step of the optimizer, with gradients that are still scaled.
    `on_epoch(last loss, scores)` is called after each validation. `profile(model)` makes a context manager around the
    loop, such as `lambda model: torch.profiler.profile(...)`; its `step()`, if it has one, is called after each step.

    `iteration_ms` is the median time from the end of a step to the end of the next, loading included;
    `iteration_mean_ms` is the mean, which is larger where a loader delivers in bursts, and gives the throughput.
    `epoch_s` is the last complete epoch with its validation, None if `steps` cut it.
    """
    marks: list[list[Any]] = []
    number, epoch_s, scores = 0, None, {}
    synchronize()

    def look(loss: Tensor) -> None:
        if on_step is not None:
            on_step(Step(number, loss, trainer.model, trainer.scaler))

    total = sum(map(trainer.task.steps, range(epochs))) if progress or trainer.task.decays else None
    bar = tqdm(total=total, unit="step", file=sys.stderr, disable=not progress)
    with bar, contextlib.nullcontext() if profile is None else profile(trainer.model) as profiler:
        for epoch in range(epochs):
            began, cut, loss = time.perf_counter(), False, None
            marks.append([moment()])
            iterator = iter(trainer.epoch(epoch))
            while not cut:
                with record_function("load"):
                    batch = next(iterator, None)
                if batch is None:
                    break
                if total is not None:
                    trainer.decay(number / total)
                loss = trainer.step(batch, look)
                marks[-1].append(moment())
                if hasattr(profiler, "step"):
                    profiler.step()
                number += 1
                bar.update()
                cut = number == steps
            if validates or not cut:
                with record_function("validation"):
                    scores = trainer.validate()
                bar.set_postfix({name: f"{value:.4f}" for name, value in scores.items()})
                if on_epoch is not None:
                    on_epoch(loss, scores)
            synchronize()
            if cut:
                break
            epoch_s = time.perf_counter() - began
    return {
        "steps": number,
        **_iterations(marks, settling),
        "epoch_s": epoch_s,
        **{f"validation_{name}": value for name, value in scores.items()},
    }


def _iterations(marks: list[list[Any]], settling: int) -> dict[str, Any]:
    """Median, percentiles and mean of the times between marks of the same epoch, without the first `settling`."""
    samples = [between_ms(*pair) for epoch in marks for pair in itertools.pairwise(epoch)]
    settled = samples[min(settling, len(samples) // 2) :]
    timing = Timing.of(settled)
    return {
        "iteration_ms": timing.median_ms,
        "iteration_p20_ms": timing.p20_ms,
        "iteration_p80_ms": timing.p80_ms,
        "iteration_mean_ms": sum(settled) / len(settled),
        "n": timing.n,
    }
