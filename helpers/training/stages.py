"""Chapter 0: the language model's training end to end, with any of the stages that make it faster.

    from helpers.training.stages import STAGES, run
    before, after = run([]), run(STAGES)        # fp32, padded, slow on purpose; and with all stages

All combinations train on the same samples, so an epoch has equally many real tokens.
"""

import contextlib
import tempfile
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from helpers.compilers import runtimes
from helpers.lab.arguments import check_positive
from helpers.lab.machine import missing_because
from helpers.lab.records import Row
from helpers.rush.fused_norms import NEEDS, OURS, swap_norms

from .loop import fit
from .precision import Precision
from .switched import LANGUAGE
from .trainer import Trainer

PRECISION = "bf16"  # chapter 3's switch; chapter 0's mixed precision is fp16 with our scaler
# Packing needs fused attention within each document, whose kernels need heads of 64 channels.
BATCHING = frozenset({"short_padding", "packed", "fused_attention", "width_1024"})
OPTIMIZER = frozenset({"fused_optimizer"})


@dataclass(frozen=True, kw_only=True)
class Stage:
    """One stage: what it is, the chapter about it, and the fixes of `switches.LANGUAGE` that it switches on."""

    about: str
    chapter: str
    fixes: frozenset[str] = frozenset()


MIXED, BATCHES, PROFILED, FUSED, COMPILED = (
    "mixed precision",
    "batching",
    "profiling fixes",
    "fused norm and optimizer",
    "compile",
)
STAGES: dict[str, Stage] = {
    MIXED: Stage(about="fp16 under autocast, with the dynamic loss scale", chapter="01_amp"),
    BATCHES: Stage(
        about="samples packed into sequences of one length; fused attention within each, heads of 64 channels for it",
        chapter="02_batching",
        fixes=BATCHING,
    ),
    PROFILED: Stage(
        about="what the profiler found: in the loader, the model, the loop and the validation",
        chapter="03_profiling",
        fixes=LANGUAGE.fixed - BATCHING - OPTIMIZER - {PRECISION},
    ),
    FUSED: Stage(
        about="AdamW in one kernel; each LayerNorm in our kernel, on a GPU: a CPU keeps torch's",
        chapter="05_optimization_rush",
        fixes=OPTIMIZER,
    ),
    COMPILED: Stage(about="torch.compile of the model", chapter="07_compilers", fixes=frozenset({"compile"})),
}


def run(
    stages: Iterable[str] = STAGES,
    *,
    preset: str = "small",
    epochs: int = 1,
    path: str | Path | None = None,
    seed: int = 0,
    **changes: Any,
) -> Row:
    """Train with these stages and no others; returns a row of times, memory and scores.

    `train_s` is the whole waiting time: tokenising, building the model, compiling from an empty cache, training and
    validation; the start of Python and CUDA, which no stage changes, is left out. cuDNN's attention is disabled, since
    it would plan for each new length. `path` is WikiText-103's folder, without it the text is generated; `changes`
    replace values of the preset.
    """
    chosen = check_stages(stages)
    check_positive(epochs=epochs)
    if seed < 0:
        raise ValueError(f"seed is {seed}; it must be at least 0")
    with _nothing_compiled() if COMPILED in chosen else contextlib.nullcontext():
        began = time.perf_counter()
        trainer = build(chosen, preset=preset, path=path, seed=seed, **changes)
        with trainer.settings():
            timed = fit(trainer, epochs=epochs)
        train_s = time.perf_counter() - began
    real = trainer.counts.real
    mean_ms = timed["iteration_mean_ms"]
    return {
        "train_s": train_s,
        "epoch_s": timed["epoch_s"],
        "iteration_mean_ms": mean_ms,
        "real_tokens_per_s": real / timed["steps"] * epochs / mean_ms * 1e3 if mean_ms else None,
        "real_tokens": real * epochs,
        "peak_gib": timed["peak_gib"],
        "validation_loss": timed["validation_loss"],
        "validation_accuracy": timed["validation_accuracy"],
        "train_loss": trainer.train_scores()["loss"],
        "skipped_steps": 0 if trainer.scaler is None else trainer.scaler.skipped_steps(),
        "steps": timed["steps"],
        "source": trainer.task.source,
    }


def build(stages: frozenset[str], **options: Any) -> Trainer:
    """The trainer of these stages, before its first step. Our fused norms need CUDA; a CPU keeps torch's."""
    fixes = frozenset().union(*(STAGES[name].fixes for name in stages))
    trainer = LANGUAGE.prepare(fixes, precision=Precision("dynamic") if MIXED in stages else None, **options)
    if FUSED in stages and not missing_because(*NEEDS[OURS]):
        swap_norms(trainer.model, OURS)
    return trainer


@contextlib.contextmanager
def _nothing_compiled() -> Iterator[None]:
    """Start with empty compilation caches, so that the time to compile is measured."""
    runtimes.start_inductor()
    torch._dynamo.reset()
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder, runtimes.empty_cache(Path(folder)):
        yield


def check_stages(stages: Iterable[str]) -> frozenset[str]:
    """The names as a frozenset, if all of them are known."""
    if isinstance(stages, str):
        raise ValueError(f"stages is {stages!r}; it must be names, such as [{stages!r}]")
    chosen = frozenset(stages)
    if unknown := sorted(chosen.difference(STAGES)):
        raise ValueError(f"unknown stage {unknown[0]!r}; valid: {', '.join(STAGES)}")
    return chosen


def cumulative(last: str) -> list[str]:
    """The stages up to and including `last`."""
    names = list(STAGES)
    return names[: names.index(last) + 1]
