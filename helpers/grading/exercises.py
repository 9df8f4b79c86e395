"""The exercises: what is handed in by which name, its check, its points, and what it must be written without."""

import inspect
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from .. import checks
from ..checks.check import Checker, Line
from ..checks.numbers import questions


@dataclass(frozen=True)
class Exercise:
    """`name` is what a notebook's cell defines, and `check(solution, **options)` judges it there as here.

    `without` names what solves it already: pieces of this library, by their room, and of torch.
    """

    chapter: int
    name: str
    check: Checker
    options: Mapping[str, Any] = field(default_factory=dict)
    points: int = 4
    without: tuple[str, ...] = ()

    def lines(self, solution: Any = object, seed: int = 0) -> list[Line]:
        """The check's lines; those without a solution can only judge."""
        drawn = {"seed": seed} if "seed" in inspect.signature(self.check).parameters else {}
        return list(self.check.lines(solution, **self.options, **drawn))


SCALERS = "amp.DynamicGradScaler", "amp.StaticGradScaler", "torch.amp.GradScaler"
WRITTEN = [
    Exercise(1, "MyScaler", checks.grad_scaler, {"reads": False}, without=SCALERS),
    Exercise(1, "MyAutocast", checks.autocast, without=("amp.Autocast", "torch.autocast")),
    Exercise(1, "my_step", checks.accumulated_step),
    Exercise(2, "MySampler", checks.batch_sampler, {"full": 0.94}, without=("batching.BalancedBatchSampler",)),
    Exercise(2, "best_fit", checks.packing, {"best_fit": True}, without=("batching.pack",)),
    Exercise(2, "my_attention", checks.packed_attention, {"apart": True}, without=("batching.packed_attention",)),
    Exercise(3, "MyScores", checks.class_scores, without=("metrics.StreamingMetrics",)),
    Exercise(
        4, "MySwigluFunction", checks.swiglu, {"levels": [2]}, without=("swiglu.MemoryOptimizedSwigluMLPFunction",)
    ),
    Exercise(5, "my_mfu", checks.mfu, without=("rush.rates.flops_per_token",)),
    Exercise(
        5, "my_chunked_loss", checks.chunked_loss, {"recomputes": True}, without=("kernels.chunked_loss.chunked",)
    ),
    Exercise(6, "MyTarShard", checks.tar_read),
    Exercise(6, "MyCounter", checks.forgetting, without=("pipelines.ForgettingTracker",)),
    Exercise(7, "guarded_trace", checks.guarded_trace, without=("torch.compile", "torch.export.export")),
    Exercise(7, "fused_with_norm", checks.fused_norm),
    Exercise(7, "three_graphs", checks.graphs),
]
ON_PAPER = [
    Exercise(chapter, name, checks.number, {"name": name}, points=1)
    for chapter, asked in questions().items()
    for name in asked
]
EXERCISES = {exercise.name: exercise for exercise in sorted(WRITTEN + ON_PAPER, key=lambda each: each.chapter)}
