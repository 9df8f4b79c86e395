"""Cost of computing accuracy and macro F1 at every step of an epoch.

scikit-learn's metrics take arrays, so a loop that computes them at each step copies predictions to the CPU, which
synchronizes, and computes over all samples of the epoch so far: O(n) at step n, O(n²) over the epoch. torchmetrics and
our confusion matrix add a batch's counts on the device, at a constant cost.

scikit-learn called only at the epoch's end costs a copy a step. torchmetrics' `forward` also computes the batch's own
value, and by default it validates labels first, which synchronizes with a GPU. Its accuracy is the mean over classes by
default, so `average="micro"` is set.
"""

import math
import statistics
import time
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
import torch
from torch import Tensor

from ...book.table import Worth, table
from ...book.values import pick
from ...lab import Row, device, missing_because
from ...lab.timing import Disagreement, synchronize
from ...metrics import StreamingMetrics

Scores = dict[str, float]
STREAMING = "confusion matrix"

# Tolerance of scores: torchmetrics divides in fp32.
TOLERANCE = 1e-6

WARMUP = 3
GROUPS = 40  # of an epoch's steps: a row for each
POOL = 16  # distinct random batches, used in a cycle


class Metric(NamedTuple):
    """`step(logits, labels)` is called for each batch; `compute()` returns `accuracy` and `macro_f1` so far."""

    step: Callable[[Tensor, Tensor], Any]
    compute: Callable[[], Scores]


@table(
    small=[{"steps": 20, "batch": 16, "classes": 4}],
    cpu=[{"steps": 320, "batch": 256, "classes": 10}],
    gpu=[{"steps": 1000, "batch": 256, "classes": 10}],
    version=2,
    columns="step variant ms until_s",
    worth=Worth(10, "what metrics cost a step", cpu=5.9, gpu=6, big_gpu=8),
)
def metrics_cost(steps: int, batch: int, classes: int) -> list[Row]:
    """Milliseconds of the metric alone in an epoch: rows of `step`, `variant`, `ms`, `until_s`.

    The variants are timed in turn at every step, each with a synchronize, on the same random batch, which is on the
    device already. A row is the median of a fortieth of the steps; `until_s` is the sum since the epoch's start.
    Different scores at the end raise a `Disagreement`. Variants that can't run are left out.
    """
    batches = random_batches(min(steps, POOL), batch, classes, device())
    usable = {variant: make for variant, (make, needs) in VARIANTS.items() if not missing_because(*needs)}
    for make in usable.values():
        warm = make(classes, device())
        for pair in batches[:WARMUP]:
            warm.step(*pair)
        warm.compute()
    metrics = {variant: make(classes, device()) for variant, make in usable.items()}
    taken: dict[str, list[float]] = {variant: [] for variant in usable}
    for step in range(steps):
        for variant, metric in metrics.items():
            synchronize()
            began = time.perf_counter()
            metric.step(*batches[step % POOL])
            synchronize()
            taken[variant].append((time.perf_counter() - began) * 1e3)
    scores = {variant: metric.compute() for variant, metric in metrics.items()}
    for variant, computed in scores.items():
        for name, expected in scores[STREAMING].items():
            if not abs(computed[name] - expected) <= TOLERANCE:
                raise Disagreement(f"{variant!r} has {name} {computed[name]:.8f}, {STREAMING!r} {expected:.8f}")
    every, rows = max(steps // GROUPS, 1), []
    for variant, ms in taken.items():
        for stop in range(every, steps + 1, every):
            times = {"ms": statistics.median(ms[stop - every : stop]), "until_s": sum(ms[:stop]) / 1e3}
            rows.append({"step": stop, "variant": variant} | times)
    return rows


def random_batches(
    count: int, batch: int, classes: int, device: torch.device, seed: int = 0
) -> list[tuple[Tensor, Tensor]]:
    """Logits (B, classes), better than random guesses, and labels (B,) of imbalanced classes."""
    generator = torch.Generator().manual_seed(seed)
    frequent = 1 / torch.arange(1, classes + 1)
    drawn = []
    for _ in range(count):
        labels = torch.multinomial(frequent, batch, replacement=True, generator=generator)
        logits = torch.randn(batch, classes, generator=generator)
        logits[torch.arange(batch), labels] += 1.5
        drawn.append((logits.to(device), labels.to(device)))
    return drawn


def _sklearn(classes: int, device: torch.device, *, each_step: bool) -> Metric:
    """Predictions and labels on the CPU, 16 bytes a sample, for functions that take all of them at once."""
    from sklearn.metrics import accuracy_score, f1_score

    predictions: list[np.ndarray] = []
    labels: list[np.ndarray] = []

    def collect(logits: Tensor, batch_labels: Tensor) -> None:
        predictions.append(logits.argmax(dim=1).cpu().numpy())
        labels.append(batch_labels.cpu().numpy())

    def compute() -> Scores:
        both = np.concatenate(labels), np.concatenate(predictions)
        return {"accuracy": float(accuracy_score(*both)), "macro_f1": float(f1_score(*both, average="macro"))}

    def collect_and_compute(logits: Tensor, batch_labels: Tensor) -> Scores:
        collect(logits, batch_labels)
        return compute()

    return Metric(collect_and_compute if each_step else collect, compute)


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


# variant -> a function from a number of classes and a device to a metric, and its requirements
VARIANTS: dict[str, tuple[Callable[[int, torch.device], Metric], tuple[str, ...]]] = {
    "scikit-learn, each step": (partial(_sklearn, each_step=True), ("scikit-learn",)),
    "scikit-learn, at the end": (partial(_sklearn, each_step=False), ("scikit-learn",)),
    "torchmetrics, forward": (partial(_torchmetrics, forward=True), ("torchmetrics",)),
    "torchmetrics, update": (partial(_torchmetrics, forward=False), ("torchmetrics",)),
    "torchmetrics, update unchecked": (partial(_torchmetrics, forward=False, checked=False), ("torchmetrics",)),
    STREAMING: (_streaming, ()),
}


# Numbers


@metrics_cost.numbers()
def _(rows: pd.DataFrame) -> SimpleNamespace:
    """Milliseconds of each metric at a step, in the first and the last tenth of the epoch."""
    growth = pd.DataFrame([{"variant": name} | _growth(line) for name, line in rows.groupby("variant", sort=False)])
    headings = {"first": "first tenth, ms", "last": "last tenth, ms"}
    return SimpleNamespace(
        table=growth.rename(columns=headings),
        steps=int(rows["step"].max()),
        sklearn_first=pick(growth, "first", "ms", 1, variant="scikit-learn, each step"),
        sklearn_last=pick(growth, "last", "ms", 1, variant="scikit-learn, each step"),
        counts_last=pick(growth, "last", "ms", 2, variant="confusion matrix"),
    )


def _growth(line: pd.DataFrame) -> dict[str, float]:
    tenth, ms = max(len(line) // 10, 1), line["ms"].to_numpy()
    slope = np.polyfit(line["step"], 1e3 * ms, 1)[0] if len(line) > 1 else math.nan
    ends = {"first": np.median(ms[:tenth]), "last": np.median(ms[-tenth:])}
    return ends | {"growth, µs/step": slope, "epoch_s": line["until_s"].max()}
