"""Chapter 0: the language model's training end to end, with any of the stages that make it faster.

    from helpers.training.stages import STAGES, run
    before, after = run([]), run(STAGES)        # fp32, padded, slow on purpose; and with all stages

All combinations train on the same samples, in steps of equally many real tokens on average.
"""

import contextlib
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ..compilers import runtimes
from ..kernels.swaps import NEEDS, OURS, swap_norms
from ..lab import Row, device, in_fresh_process, missing_because
from ..lab.arguments import check_at_least
from ..lab.cpu import KEPT
from ..lab.memory import PeakAbove
from .language import guess_scores
from .loop import Step, fit
from .switched import LANGUAGE
from .switches import check_names
from .task import Precision, TaskTrainer, mixed_precision

PRECISION = "bf16"  # chapter 3's switch, in whose place `mixed_precision` chooses
# Packing needs fused attention within each document, whose kernels need heads of 64 channels.
BATCHING = frozenset({"short_padding", "packed", "fused_attention", "width_1024"})
OPTIMIZER = frozenset({"fused_optimizer"})
SETTLING = 20  # steps that don't count for the steady state: among them are those in which shapes are compiled
RISING = 0.1  # share of the steps in which the learning rate rises


@dataclass(frozen=True, kw_only=True)
class Stage:
    """One stage: what it is, the chapter about it, and the fixes of `switches.LANGUAGE` that it switches on."""

    about: str
    chapter: str
    fixes: frozenset[str] = frozenset()


STAGES: dict[str, Stage] = {
    "mixed precision": Stage(
        about="bf16 under autocast; fp16 with our loss scale on a GPU without bf16", chapter="01_amp"
    ),
    "batching": Stage(
        about="samples packed into sequences of one length; fused attention within each, heads of 64 channels for it",
        chapter="02_batching",
        fixes=BATCHING,
    ),
    "profiling fixes": Stage(
        about="what the profiler found: in the loader, the model, the loop and the validation",
        chapter="03_profiling",
        fixes=LANGUAGE.fixed - BATCHING - OPTIMIZER - {PRECISION},
    ),
    "fused norm and optimizer": Stage(
        about="AdamW in one kernel; each LayerNorm in our kernel, on a GPU: a CPU keeps torch's",
        chapter="05_optimization_rush",
        fixes=OPTIMIZER,
    ),
    "compile": Stage(about="torch.compile of the model", chapter="07_compilers", fixes=frozenset({"compile"})),
}
MIXED, BATCHES, PROFILED, FUSED, COMPILED = STAGES


def run(stages: Iterable[str] = STAGES, *, epochs: int = 1, **options: Any) -> Row:
    """Train with these stages and no others; returns a row of times, memory and scores.

    `train_s` is the whole waiting time: tokenising, building the model, compiling from an empty cache, training and
    validation; the start of Python and CUDA, which no stage changes, is left out. `real_tokens_per_s` and `step_ms` are
    the steady state's. `constant_accuracy` is that of always guessing the most frequent token.

    `peak_gib` is above what was allocated before (`PeakAbove`): on a CPU that is the training's need only in a process
    of its own (`run_apart`), where glibc keeps freed pages, too. cuDNN's attention is disabled, since it would plan for
    each new length. `options` are those of `Switched.prepare`.
    """
    chosen = check_names(stages, STAGES, "stage", "stages")
    check_at_least(1, epochs=epochs)
    check_at_least(0, seed=options.get("seed", 0))
    with PeakAbove() as peak, nothing_compiled() if COMPILED in chosen else contextlib.nullcontext():
        began = time.perf_counter()
        trainer = build_trainer(chosen, **options)
        with trainer.settings():
            timed = fit(trainer, epochs=epochs, settling=SETTLING, on_step=_schedule(trainer, epochs))
        train_s = time.perf_counter() - began
    counts, mean_ms = trainer.counts, timed["iteration_mean_ms"]
    return {
        "train_s": train_s,
        "epoch_s": timed["epoch_s"],
        "step_ms": timed["iteration_ms"],
        "real_tokens_per_s": counts.real / counts.steps / mean_ms * 1e3,
        "real_tokens": counts.real * epochs,
        "padding_share": 1 - counts.real / counts.positions,
        "peak_gib": peak.gib,
        "validation_loss": timed["validation_loss"],
        "validation_accuracy": timed["validation_accuracy"],
        "constant_accuracy": guess_scores(trainer.task)["guess_accuracy"],
        "train_loss": trainer.train_scores()["loss"],
        "skipped_steps": trainer.scaler.skipped_steps() if hasattr(trainer.scaler, "skipped_steps") else 0,
        "steps": timed["steps"],
        "million_parameters": sum(parameter.numel() for parameter in trainer.model.parameters()) / 1e6,
        "precision": trainer.precision.name,
        "source": trainer.task.source,
    }


def run_apart(stages: Iterable[str], **options: Any) -> Row:
    """`run` in a process of its own, whose allocator keeps its pages. It takes some seconds to start."""
    return in_fresh_process(run, check_names(stages, STAGES, "stage", "stages"), environment=environment(), **options)


def environment() -> dict[str, str]:
    """The variables with which a process starts to keep its pages; on a GPU, whose memory torch keeps, none."""
    return {} if device().type == "cuda" else dict(KEPT)


def build_trainer(stages: frozenset[str], *, preset: str = "small", **options: Any) -> TaskTrainer:
    """The trainer of these stages, before its first step. Our fused norms need CUDA; a CPU keeps torch's."""
    fixes = frozenset().union(*(STAGES[name].fixes for name in stages))
    precision = mixed_precision() if MIXED in stages else Precision()
    trainer = LANGUAGE.prepare(fixes, preset=preset, precision=precision, **options)
    if FUSED in stages and not missing_because(*NEEDS[OURS]):
        swap_norms(trainer.model, OURS)
    return trainer


def _schedule(trainer: TaskTrainer, epochs: int) -> Callable[[Step], None]:
    """Before each step: a learning rate that rises for a tenth of the steps, and then falls to 0."""
    total, highest = sum(map(trainer.task.steps, range(epochs))), trainer.task.learning_rate

    def set_rate(step: Step) -> None:
        done = (step.number + 1) / (total + 1)
        for group in trainer.optimizer.param_groups:
            group["lr"] = highest * min(done / RISING, (1 - done) / (1 - RISING))

    return set_rate


@contextlib.contextmanager
def nothing_compiled() -> Iterator[None]:
    """Start with empty compilation caches, so that the time to compile is measured."""
    runtimes.start_inductor()
    torch._dynamo.reset()
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder, runtimes.empty_cache(Path(folder)):
        yield
