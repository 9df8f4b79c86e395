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
from typing import Any

import numpy as np
import torch
from torch import Tensor

from helpers.lab import device as this_device
from helpers.lab.arguments import check_at_least, check_positive
from helpers.lab.machine import NOT_INSTALLED, installed
from helpers.lab.timing import Disagreement, Timing, synchronize
from helpers.profiling.epoch_metrics import StreamingMetrics

Scores = dict[str, float]

# How far two ways' scores may be apart: torchmetrics divides in fp32.
TOLERANCE = 1e-6

WARMUP = 3
POOL = 16  # so many batches are drawn, and come again and again


@dataclass(frozen=True)
class Metric:
    """`step(logits, labels)` is what the loop calls for a batch, `compute()` gives `accuracy` and `macro_f1` so far."""

    step: Callable[[Tensor, Tensor], Any]
    compute: Callable[[], Scores]


def obstacle(way: str) -> str:
    """Why a way can't run here, in a line for a table's status; "" if it can."""
    if way not in WAYS:
        raise ValueError(f"unknown way {way!r}; valid: {'; '.join(WAYS)}")
    needed = {"scikit-learn": "sklearn", "torchmetrics": "torchmetrics"}
    for package, module in needed.items():
        if way.startswith(package) and installed(module) is None:
            return NOT_INSTALLED + package
    return ""


def build(way: str, classes: int, device: torch.device | None = None) -> Metric:
    """A way's metric, for logits (B, classes) and labels (B,) on the device."""
    check_at_least(2, classes=classes)
    if reason := obstacle(way):
        raise ValueError(reason)
    return WAYS[way](classes, device or this_device())


def measure_metrics(
    steps: int, batch: int, classes: int, ways: Sequence[str] | None = None, *, seed: int = 0
) -> list[dict[str, Any]]:
    """Milliseconds of the metric alone at each step of an epoch: rows of `step`, `way`, `ms`.

    The ways take turns at every step on the same random batch, which is on the device before the clock starts; each is
    waited for. At the end all must have the same scores, or it is a `Disagreement`. Ways that can't run are left out.
    """
    check_positive(steps=steps, batch=batch)
    check_at_least(0, seed=seed)
    device, ways = this_device(), list(WAYS) if ways is None else list(ways)
    batches = random_batches(min(steps, POOL), batch, classes, seed=seed, device=device)
    usable = [way for way in ways if not obstacle(way)]
    for way in usable:
        warm = build(way, classes, device)
        for at in range(WARMUP):
            warm.step(*batches[at % len(batches)])
        warm.compute()
    metrics = {way: build(way, classes, device) for way in usable}
    rows = []
    for step in range(steps):
        logits, labels = batches[step % len(batches)]
        for way, metric in metrics.items():
            synchronize()
            began = time.perf_counter()
            metric.step(logits, labels)
            synchronize()
            rows.append({"step": step, "way": way, "ms": (time.perf_counter() - began) * 1e3})
    check_scores({way: metric.compute() for way, metric in metrics.items()})
    return rows


def growth(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """A row a way about `measure_metrics`' rows: cost at the beginning and at the end of the epoch, and the slope.

    `first_ms` and `last_ms` are medians over the first and the last tenth of the steps, `slope_us_per_step` is by how
    much a step gets slower with each step: the median of the slopes between all pairs of steps that lie half an epoch
    apart, with the 20th and 80th percentile; single slow steps don't bend it. `n` is the number of steps, the
    times are over all of them.
    """
    found = []
    for way in dict.fromkeys(row["way"] for row in rows):
        ms = np.array([row["ms"] for row in sorted(rows, key=lambda row: row["step"]) if row["way"] == way])
        if len(ms) < 2:
            raise ValueError(f"{way!r} has {len(ms)} step; a slope takes 2 or more")
        tenth, half = max(len(ms) // 10, 1), len(ms) // 2
        p20, slope, p80 = np.percentile((ms[half:] - ms[:-half]) / half * 1e3, [20, 50, 80])
        found.append(
            {"way": way, "first_ms": float(np.median(ms[:tenth])), "last_ms": float(np.median(ms[-tenth:]))}
            | {"slope_us_per_step": float(slope), "slope_p20": float(p20), "slope_p80": float(p80)}
            | {"total_s": float(ms.sum() / 1e3)}
            | Timing.of(list(ms)).row()
        )
    return found


def check_scores(scores: dict[str, Scores]) -> None:
    """A `Disagreement` that names the first way whose scores aren't those of the first."""
    reference = next(iter(scores), None)
    for way, found in scores.items():
        for name, expected in scores[reference].items():
            if not abs(found[name] - expected) <= TOLERANCE:
                raise Disagreement(f"{way!r} has {name} {found[name]:.8f}, {reference!r} {expected:.8f}")


def random_batches(
    count: int, batch: int, classes: int, *, seed: int = 0, device: torch.device | None = None
) -> list[tuple[Tensor, Tensor]]:
    """Logits (B, classes) that are right more often than by chance, and labels (B,), rare classes among them."""
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


def _sklearn_each_step(classes: int, device: torch.device) -> Metric:
    kept = _Collected()

    def step(logits: Tensor, labels: Tensor) -> Scores:
        kept.update(logits, labels)
        return kept.compute()

    return Metric(step, kept.compute)


def _sklearn_at_the_end(classes: int, device: torch.device) -> Metric:
    kept = _Collected()
    return Metric(kept.update, kept.compute)


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


# A way's name begins with the package that it needs.
WAYS: dict[str, Callable[[int, torch.device], Metric]] = {
    "scikit-learn, each step": _sklearn_each_step,
    "scikit-learn, at the end": _sklearn_at_the_end,
    "torchmetrics, forward": lambda classes, device: _torchmetrics(classes, device, forward=True),
    "torchmetrics, update": lambda classes, device: _torchmetrics(classes, device, forward=False),
    "torchmetrics, update unchecked": lambda classes, device: _torchmetrics(
        classes, device, forward=False, checked=False
    ),
    "confusion matrix": _streaming,
}
