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

    `piece` is what of this library a handout lacks, and the solution can take the place of; `beside` goes with it.
    `without` names what else solves it already: pieces of this library, by their room, and of torch.
    """

    chapter: int
    name: str
    check: Checker
    options: Mapping[str, Any] = field(default_factory=dict)
    points: float = 4
    without: tuple[str, ...] = ()
    piece: str = ""
    beside: tuple[str, ...] = ()

    @property
    def cut(self) -> tuple[str, ...]:
        return (self.piece, *self.beside) if self.piece else ()

    @property
    def refused(self) -> tuple[str, ...]:
        return (*self.without, *self.cut)

    def lines(self, solution: Any = object, seed: int = 0) -> list[Line]:
        """The check's lines; those without a solution can only judge."""
        drawn = {"seed": seed} if "seed" in inspect.signature(self.check).parameters else {}
        return list(self.check.lines(solution, **self.options, **drawn))


STATIC, DYNAMIC = "amp.scaler.StaticGradScaler", "amp.dynamic_scaler.DynamicGradScaler"
SCALERS = DYNAMIC, STATIC, "torch.amp.GradScaler"
AUTOCASTS = "amp.autocast.Autocast", "torch.autocast"
SUMS, PRODUCTS = ["layer_norm", "softmax", "cross_entropy"], ["matmul", "conv2d"]
SWIGLU = "swiglu.function.MemoryOptimizedSwigluMLPFunction"
ELEMENTWISE = "activate", "activate_keeping", "activate_packing", "differentiate", "differentiate_packed"
IN_STEPS = "swiglu.steps.forward", "swiglu.steps.backward"
LAYER = (*IN_STEPS, *(f"swiglu.{file}.{name}" for file in ("elementwise", "triton_kernels") for name in ELEMENTWISE))
FITS = "batching.packing.first_fit", "batching.packing.best_fit"
PACKERS = "batching.pack", "batching.packing._fit_decreasing", *FITS
PLANS = "batching.packing.plan_stream", "batching.packing.plan_packs"
WITHIN = "documents.documents_attention", "attention.block_mask", "packed.causal_mask"
BY_DOCUMENT = (*(f"batching.{name}" for name in WITHIN), "chapters.batching.attention._per_document")
ATTENTIONS = "batching.packed_attention", "checks.batching._alone", *BY_DOCUMENT
PADDED, SAMPLER = ("torch.nn.utils.rnn.pad_sequence",), "batching.sampler.BalancedBatchSampler"
CAPTURES = "torch.compile", "torch.export.export"
# What a notebook solves itself, in a cell tagged `solution`. Points are the larger of the tasks' texts.
SOLVED = [
    Exercise(1, "StaticScaler", checks.grad_scaler, {"dynamic": False}, 1.5, SCALERS, STATIC),
    Exercise(1, "DynamicScaler", checks.grad_scaler, points=1.5, without=SCALERS, piece=DYNAMIC),
    Exercise(1, "TinyAutocast", checks.autocast, {"fp32": SUMS, "low": PRODUCTS}, 2, AUTOCASTS, AUTOCASTS[0]),
    Exercise(2, "BrainDataset", checks.dataset, {"padded": True}, 0.5, ("batching.BaseDataset",)),
    Exercise(2, "BigBrainDataset", checks.dataset, points=0.5, without=("batching.StandardDataset",)),
    Exercise(2, "collate", checks.collated, points=0.5, without=PADDED, piece="batching.datasets.collate_fn"),
    Exercise(2, "BalancedSampler", checks.batch_sampler, points=2.5, piece=SAMPLER),
    Exercise(2, "first_fit", checks.packing, without=PACKERS, piece=FITS[0]),
    Exercise(2, "block_diagonal", checks.packed_attention, without=ATTENTIONS),
    Exercise(4, "SwigluFunction", checks.swiglu, piece=SWIGLU, beside=LAYER),
    Exercise(7, "trace", checks.guarded_trace, {"guards": False}, without=CAPTURES),
    Exercise(7, "fused", checks.fused_norm, {"norm": False}, piece="chapters.compilers.fusion.in_blocks"),
]
WRITTEN = [
    Exercise(1, "MyScaler", checks.grad_scaler, {"reads": False}, without=SCALERS),
    Exercise(1, "MyAutocast", checks.autocast, {"fp32": SUMS[:1]}, without=AUTOCASTS),
    Exercise(1, "my_step", checks.accumulated_step),
    Exercise(2, "MySampler", checks.batch_sampler, {"full": 0.94}, without=(SAMPLER,)),
    Exercise(2, "best_fit", checks.packing, {"best_fit": True}, without=PACKERS, piece=FITS[1]),
    Exercise(
        2,
        "my_attention",
        checks.packed_attention,
        {"apart": True},
        without=ATTENTIONS,
        piece="batching.attention.packed_attention",
        beside=BY_DOCUMENT,
    ),
    Exercise(
        2, "MySequencedDataset", checks.sequenced, points=1.5, piece="batching.sequenced.SequencedDataset", beside=PLANS
    ),
    Exercise(2, "MyAccuracy", checks.token_accuracy, points=1, piece="metrics.LMAccuracy"),
    Exercise(2, "MyCrossEntropyLoss", checks.token_loss, points=1, piece="metrics.LMCrossEntropyLoss"),
    Exercise(
        2,
        "MyPositionalEncoding",
        checks.positional_encoding,
        points=1,
        piece="models.gpt.PositionalEncoding",
        beside=("models.gpt.sinusoids",),
    ),
    Exercise(3, "MyProfiler", checks.module_times, without=("profiling.module_profiler.ModuleProfiler",)),
    Exercise(3, "my_reading", checks.reading, points=2.5),
    Exercise(3, "MyScores", checks.class_scores, without=("metrics.StreamingMetrics",)),
    Exercise(4, "MySwigluFunction", checks.swiglu, {"levels": [2]}, without=(SWIGLU, *LAYER)),
    Exercise(4, "MyPackedFunction", checks.swiglu, {"levels": [3]}, without=(SWIGLU, *LAYER)),
    Exercise(5, "my_mfu", checks.mfu, without=("rush.rates.flops_per_token",)),
    Exercise(
        5, "my_chunked_loss", checks.chunked_loss, {"recomputes": True}, without=("kernels.chunked_loss.chunked",)
    ),
    Exercise(6, "MyTarShard", checks.tar_read),
    Exercise(6, "MyCounter", checks.forgetting, without=("pipelines.ForgettingTracker",)),
    Exercise(7, "guarded_trace", checks.guarded_trace, without=CAPTURES),
    Exercise(7, "fused_with_norm", checks.fused_norm),
    Exercise(7, "three_graphs", checks.graphs),
]
ON_PAPER = [
    Exercise(chapter, name, checks.number, {"name": name}, points=1)
    for chapter, asked in questions().items()
    for name in asked
]
EXERCISES = {exercise.name: exercise for exercise in sorted(SOLVED + WRITTEN + ON_PAPER, key=lambda each: each.chapter)}
