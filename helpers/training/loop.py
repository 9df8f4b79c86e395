"""The training loop: epochs, steps, validation, timing, and a profiler around it.

Its traces have the ranges "load" and "validation", besides those of a step that `Trainer` names.
"""

import contextlib
import itertools
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.profiler import record_function
from tqdm import tqdm

from helpers.lab import Timing
from helpers.lab.arguments import check_positive
from helpers.lab.memory import GIB
from helpers.lab.timing import between_ms, moment, synchronize

from .trainer import Trainer

SETTLING = 5  # warm-up steps, not timed: start of workers, choice of kernels, compilation, recording
ENOUGH = 8  # timed steps that suffice once `within_s` is exceeded


@dataclass(frozen=True)
class Step:
    """What `on_step` gets: the loss, on the device, and the model with its gradients."""

    number: int
    loss: Tensor
    model: nn.Module
    scaler: Any


OnStep = Callable[[Step], Any]
Profile = Callable[[nn.Module], contextlib.AbstractContextManager]
Ended = Callable[[int, Tensor, dict[str, float]], Any]


@dataclass(frozen=True)
class Excerpt:
    """The first `steps` steps of a run, or the whole run if None; the first `settling` of them are not timed.

    It ends early after `within_s` seconds if `ENOUGH` steps are timed by then.
    """

    steps: int | None
    settling: int = SETTLING
    within_s: float = float("inf")
    validates: bool = False

    @classmethod
    def of(cls, steps: "int | Excerpt | None") -> "Excerpt":
        """From a caller's argument: a number of steps means a run that is cut short, and validated."""
        if isinstance(steps, Excerpt):
            return steps
        check_positive(steps=1 if steps is None else steps)
        return cls(steps, validates=True)

    def ends(self, done: int, seconds: float) -> bool:
        return done == self.steps or (seconds > self.within_s and done >= self.settling + ENOUGH)


def fit(
    trainer: Trainer,
    *,
    epochs: int,
    excerpt: Excerpt | None = None,
    on_step: OnStep | None = None,
    on_stop: Ended | None = None,
    profile: Profile | None = None,
    progress: bool = False,
) -> dict[str, Any]:
    """Train and validate, epoch by epoch; call it inside `trainer.settings()`. Returns times, memory and scores.

    `on_step` is called before each step of the optimizer, with gradients that are still scaled. `profile(model)` makes
    a context manager around the loop, such as `lambda model: torch.profiler.profile(...)`; its `step()`, if it has one,
    is called after each step.
    `on_stop(steps done, last loss, scores)` is called at the end of each epoch and of the excerpt, with empty scores if
    nothing was validated.

    `iteration_ms` is the median time from the end of a step to the end of the next, loading included;
    `iteration_mean_ms` is the mean, which is larger where a loader delivers in bursts, and gives the throughput.
    `epoch_s` is the last complete epoch with its validation, None if the excerpt cut it.
    """
    marks: list[list[Any]] = []
    number, epoch_s, scores = 0, None, {}
    excerpt, run_began = excerpt or Excerpt(None), time.perf_counter()
    on_gpu = trainer.device.type == "cuda"
    if on_gpu:
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
    total = sum(map(trainer.task.steps, range(epochs))) if progress else None
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
                loss = trainer.step(batch, _gradient_callback(on_step, number, trainer))
                marks[-1].append(moment())
                if hasattr(profiler, "step"):
                    profiler.step()
                number += 1
                bar.update()
                cut = excerpt.ends(number, time.perf_counter() - run_began)
            validated: dict[str, float] = {}
            if excerpt.validates or not cut:
                with record_function("validation"):
                    validated = scores = trainer.validate()
                if progress:
                    bar.set_postfix({name: f"{value:.4f}" for name, value in validated.items()})
            synchronize()
            if on_stop is not None:
                on_stop(number, loss, validated)
            if cut:
                break
            epoch_s = time.perf_counter() - began
    return {
        "steps": number,
        **_iterations(marks, excerpt.settling),
        "epoch_s": epoch_s,
        "peak_gib": torch.cuda.max_memory_allocated() / GIB if on_gpu else None,
        **{f"validation_{name}": value for name, value in scores.items()},
    }


def _gradient_callback(on_step: OnStep | None, number: int, trainer: Trainer) -> Callable[[Tensor], Any]:
    if on_step is None:
        return lambda loss: None
    return lambda loss: on_step(Step(number, loss, trainer.model, trainer.scaler))


def _iterations(marks: list[list[Any]], settling: int) -> dict[str, Any]:
    """Median, percentiles and mean of the times between marks of the same epoch, without the first `settling`."""
    samples = [between_ms(*pair) for epoch in marks for pair in itertools.pairwise(epoch)]
    settled = samples[min(settling, len(samples) // 2) :]
    if not settled:
        return {name: None for name in ("iteration_ms", "iteration_p20_ms", "iteration_p80_ms", "iteration_mean_ms")}
    timing = Timing.of(settled)
    return {
        "iteration_ms": timing.median_ms,
        "iteration_p20_ms": timing.p20_ms,
        "iteration_p80_ms": timing.p80_ms,
        "iteration_mean_ms": sum(settled) / len(settled),
        "n": timing.n,
    }
