"""Accuracy and F1 of an epoch so far, in two ways that give the same numbers at very different prices.

`CollectedMetrics` copies every batch to the CPU and computes over all of them again, as a metric of scikit-learn in the
loop does: at step n that is a wait for the device and O(n) work, O(n²) over the epoch. `StreamingMetrics` adds counts
to a confusion matrix on the device: the same few kernels at each step, nothing is read until `compute`.
"""

import numpy as np
import torch
from torch import Tensor


class CollectedMetrics:
    """Keeps all outputs on the CPU, 4·classes bytes a sample."""

    def __init__(self, classes: int) -> None:
        self.classes = classes
        self.reset()

    def reset(self) -> None:
        self._logits: list[np.ndarray] = []
        self._labels: list[np.ndarray] = []

    def update(self, logits: Tensor, labels: Tensor) -> None:
        """Adds a batch, logits (B, classes) and labels (B,). Waits for the device."""
        self._logits.append(logits.detach().float().cpu().numpy())
        self._labels.append(labels.cpu().numpy())

    def compute(self) -> dict[str, float]:
        """`accuracy` and `macro_f1` over everything since `reset`. 0.2 µs a sample: a sort, then a pass for each class.

        Which classes there are is looked up among the answers, for a metric that is given arrays can't know.
        """
        if not self._labels:
            return {"accuracy": float("nan"), "macro_f1": float("nan")}
        predicted = np.concatenate(self._logits).argmax(axis=1)
        labels = np.concatenate(self._labels)
        right, asked, answered = np.zeros((3, self.classes))
        for at in np.union1d(labels, predicted):
            right[at] = ((labels == at) & (predicted == at)).sum()
            asked[at], answered[at] = (labels == at).sum(), (predicted == at).sum()
        return _scores(right, asked, answered)


class StreamingMetrics:
    """Keeps a confusion matrix on the device: 8·classes² bytes, whatever the epoch's length."""

    def __init__(self, classes: int) -> None:
        self.classes = classes
        self.reset()

    def reset(self) -> None:
        self._counts: Tensor | None = None  # (classes²,) by label, then prediction

    def update(self, logits: Tensor, labels: Tensor) -> None:
        """Adds a batch. Nothing waits: unlike `bincount`, adding at places needs no look at the largest one."""
        if self._counts is None:
            self._counts = torch.zeros(self.classes**2, dtype=torch.int64, device=logits.device)
        places = labels * self.classes + logits.detach().argmax(dim=1)
        self._counts.scatter_add_(0, places, torch.ones_like(places))

    def compute(self) -> dict[str, float]:
        """`accuracy` and `macro_f1` over everything since `reset`. Reads the device once."""
        if self._counts is None:
            return {"accuracy": float("nan"), "macro_f1": float("nan")}
        counts = self._counts.view(self.classes, self.classes).cpu().numpy()
        return _scores(counts.diagonal(), counts.sum(axis=1), counts.sum(axis=0))


def _scores(right: np.ndarray, asked: np.ndarray, answered: np.ndarray) -> dict[str, float]:
    """From counts by class. A class that was neither asked for nor answered has no F1 and isn't in the mean."""
    seen = asked + answered > 0
    f1 = 2 * right[seen] / (asked + answered)[seen]
    return {"accuracy": float(right.sum() / asked.sum()), "macro_f1": float(f1.mean())}
