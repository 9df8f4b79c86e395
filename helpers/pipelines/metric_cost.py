"""What accuracy and macro F1 cost when a loop asks for them at every step of an epoch.

A metric of scikit-learn takes arrays, so a loop that wants it at each step copies the answers to the CPU, which waits
for the device, and computes over everything since the epoch began: O(n) at step n, O(n²) over the epoch. Counts grow
with nothing: torchmetrics and our confusion matrix add a batch on the device, whatever the step.

What grows is not the library but what is asked of it: scikit-learn once, at the epoch's end, costs a copy a step.
torchmetrics' `forward` also computes the batch's own value; and as it comes it checks labels first, which on a GPU
waits for it. Its accuracy is the mean over classes unless `average="micro"` is said.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from helpers.lab import device as this_device
from helpers.lab.arguments import check_at_least, check_choice, check_positive
from helpers.lab.machine import missing_because
from helpers.lab.timing import Disagreement, Timing, synchronize
from helpers.metrics import StreamingMetrics

Scores = dict[str, float]

# How far scores may be apart: torchmetrics divides in fp32.
TOLERANCE = 1e-6

WARMUP = 3
POOL = 16  # so many batches are drawn, and come again and again


@dataclass(frozen=True)
class Metric:
    """`step(logits, labels)` is what the loop calls for a batch, `compute()` gives `accuracy` and `macro_f1` so far."""

    step: Callable[[Tensor, Tensor], Any]
    compute: Callable[[], Scores]


@dataclass(frozen=True)
class Variant:
    """How a metric is made, for so many classes on a device; and what that needs."""

    make: Callable[[int, torch.device], Metric]
    needs: tuple[str, ...] = ()


def build(variant: str, classes: int, device: torch.device | None = None) -> Metric:
    """A metric for logits (B, classes) and labels (B,) on the device."""
    check_at_least(2, classes=classes)
    check_choice(VARIANTS, variant=variant)
    if reason := missing_because(*VARIANTS[variant].needs):
        raise ValueError(reason)
    return VARIANTS[variant].make(classes, device or this_device())


def measure_metrics(
    steps: int, batch: int, classes: int, variants: Sequence[str] | None = None
) -> list[dict[str, Any]]:
    """Milliseconds of the metric alone at each step of an epoch: rows of `step`, `variant`, `ms`.

    The variants take turns at every step on the same random batch, which is on the device before the clock starts; each
    is waited for. At the end all must have the same scores, or it is a `Disagreement`. Variants that can't run are left
    out.
    """
    check_positive(steps=steps, batch=batch)
    for variant in variants or ():
        check_choice(VARIANTS, variant=variant)
    device, variants = this_device(), list(VARIANTS) if variants is None else variants
    batches = random_batches(min(steps, POOL), batch, classes, device=device)
    usable = [variant for variant in variants if not missing_because(*VARIANTS[variant].needs)]
    for variant in usable:
        warm = build(variant, classes, device)
        for at in range(WARMUP):
            warm.step(*batches[at % len(batches)])
        warm.compute()
    metrics = {variant: build(variant, classes, device) for variant in usable}
    rows = []
    for step in range(steps):
        logits, labels = batches[step % len(batches)]
        for variant, metric in metrics.items():
            synchronize()
            began = time.perf_counter()
            metric.step(logits, labels)
            synchronize()
            rows.append({"step": step, "variant": variant, "ms": (time.perf_counter() - began) * 1e3})
    check_scores({variant: metric.compute() for variant, metric in metrics.items()})
    return rows


def growth(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """A row a variant about `measure_metrics`' rows: cost at the beginning and at the end of the epoch, and the slope.

    `first_ms` and `last_ms` are medians over the first and the last tenth of the steps, `slope_us_per_step` is by how
    much a step gets slower with each step: the median of the slopes between all pairs of steps that lie half an epoch
    apart, with the 20th and 80th percentile; single slow steps don't bend it. `n` is the number of steps, the
    times are over all of them.
    """
    grown = []
    for variant in dict.fromkeys(row["variant"] for row in rows):
        ms = np.array([row["ms"] for row in sorted(rows, key=lambda row: row["step"]) if row["variant"] == variant])
        if len(ms) < 2:
            raise ValueError(f"{variant!r} has {len(ms)} step; a slope takes 2 or more")
        tenth, half = max(len(ms) // 10, 1), len(ms) // 2
        p20, slope, p80 = np.percentile((ms[half:] - ms[:-half]) / half * 1e3, [20, 50, 80])
        grown.append(
            {"variant": variant, "first_ms": float(np.median(ms[:tenth])), "last_ms": float(np.median(ms[-tenth:]))}
            | {"slope_us_per_step": float(slope), "slope_p20": float(p20), "slope_p80": float(p80)}
            | {"total_s": float(ms.sum() / 1e3)}
            | Timing.of(list(ms)).row()
        )
    return grown


def check_scores(scores: dict[str, Scores]) -> None:
    """A `Disagreement` that names the first variant whose scores aren't those of the first."""
    reference = next(iter(scores), None)
    for variant, computed in scores.items():
        for name, expected in scores[reference].items():
            if not abs(computed[name] - expected) <= TOLERANCE:
                raise Disagreement(f"{variant!r} has {name} {computed[name]:.8f}, {reference!r} {expected:.8f}")


def random_batches(
    count: int, batch: int, classes: int, *, seed: int = 0, device: torch.device | None = None
) -> list[tuple[Tensor, Tensor]]:
    """Logits (B, classes) that are right more often than a random guess, and labels (B,), rare classes among them."""
    generator = torch.Generator().manual_seed(seed)
    frequent = 1 / torch.arange(1, classes + 1)
    drawn = []
    for _ in range(count):
        labels = torch.multinomial(frequent, batch, replacement=True, generator=generator)
        logits = torch.randn(batch, classes, generator=generator)
        logits[torch.arange(batch), labels] += 1.5
        drawn.append((logits.to(device or this_device()), labels.to(device or this_device())))
    return drawn


class _Collected:
    """Answers and labels on the CPU, 16 bytes a sample, for functions that want all of them."""

    def __init__(self) -> None:
        self.answers: list[np.ndarray] = []
        self.labels: list[np.ndarray] = []

    def update(self, logits: Tensor, labels: Tensor) -> None:
        self.answers.append(logits.argmax(dim=1).cpu().numpy())
        self.labels.append(labels.cpu().numpy())

    def compute(self) -> Scores:
        from sklearn.metrics import accuracy_score, f1_score

        labels, answers = np.concatenate(self.labels), np.concatenate(self.answers)
        return {
            "accuracy": float(accuracy_score(labels, answers)),
            "macro_f1": float(f1_score(labels, answers, average="macro")),
        }


def _sklearn(classes: int, device: torch.device, *, each_step: bool) -> Metric:
    collected = _Collected()

    def step(logits: Tensor, labels: Tensor) -> Scores:
        collected.update(logits, labels)
        return collected.compute()

    return Metric(step if each_step else collected.update, collected.compute)


def _torchmetrics(classes: int, device: torch.device, *, forward: bool, checked: bool = True) -> Metric:
    from torchmetrics import MetricCollection
    from torchmetrics.classification import MulticlassAccuracy, MulticlassF1Score

    both = MetricCollection(
        {
            "accuracy": MulticlassAccuracy(classes, average="micro", validate_args=checked),
            "macro_f1": MulticlassF1Score(classes, average="macro", validate_args=checked),
        }
    ).to(device)

    def compute() -> Scores:
        return {name: float(value) for name, value in both.compute().items()}

    return Metric(both if forward else both.update, compute)


def _streaming(classes: int, device: torch.device) -> Metric:
    ours = StreamingMetrics(classes)
    return Metric(ours.update, ours.compute)


VARIANTS: dict[str, Variant] = {
    "scikit-learn, each step": Variant(partial(_sklearn, each_step=True), ("scikit-learn",)),
    "scikit-learn, at the end": Variant(partial(_sklearn, each_step=False), ("scikit-learn",)),
    "torchmetrics, forward": Variant(partial(_torchmetrics, forward=True), ("torchmetrics",)),
    "torchmetrics, update": Variant(partial(_torchmetrics, forward=False), ("torchmetrics",)),
    "torchmetrics, update unchecked": Variant(partial(_torchmetrics, forward=False, checked=False), ("torchmetrics",)),
    "confusion matrix": Variant(_streaming),
}
