"""Losses and metrics that look at real tokens only, and metrics that never make the host wait for the device.

An `.item()` in each step stops the host until the GPU has caught up. The metrics here add up counts on the device,
and only `compute()` reads them.
"""

import math

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn


class LMCrossEntropyLoss(nn.Module):
    """Mean cross-entropy of logits (B, T, V) over the targets (B, T) that are not `pad_id`.

    Half-precision logits are summed up in fp32: log-probabilities of 4 bytes per logit are kept for backward, and
    backward needs 4 more; at B·T = 32·640 and V = 50,000 that is 3.8 GiB each. In fp16 the sum over V would overflow
    and a probability below 6e-8 would be 0. A batch with no real token has loss 0 and gradient 0.
    """

    def __init__(self, pad_id: int = 0) -> None:
        super().__init__()
        self.pad_id = pad_id

    def forward(self, logits: Tensor, targets: Tensor) -> Tensor:
        _check_pair(logits, targets, classes=True)
        dtype = torch.promote_types(logits.dtype, torch.float32)
        log_probabilities = F.log_softmax(logits, dim=-1, dtype=dtype).flatten(0, -2)  # (B·T, V)
        total = F.nll_loss(log_probabilities, targets.flatten(), ignore_index=self.pad_id, reduction="sum")
        return total / (targets != self.pad_id).sum().clamp(min=1)

    def extra_repr(self) -> str:
        return f"pad_id={self.pad_id}"


class _Accuracy:
    """Right and counted so far. An update adds two numbers on the device; nothing waits."""

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        self._right: Tensor | int = 0
        self._counted: Tensor | int = 0

    def update(self, output: Tensor, targets: Tensor) -> None:
        right, counted = self._count(output, targets)
        self._right = self._right + right
        self._counted = self._counted + counted

    def compute(self) -> float:
        """The share of right answers since `reset`; nan if there was nothing to count. Reads the device once."""
        if not isinstance(self._right, Tensor):
            return math.nan
        right, counted = torch.stack([self._right, torch.as_tensor(self._counted).to(self._right)]).tolist()
        return right / counted if counted else math.nan

    def __call__(self, output: Tensor, targets: Tensor) -> Tensor:
        """The accuracy of this batch as a tensor on its device. What was added up so far stays as it is."""
        right, counted = self._count(output, targets)
        return right / counted

    def _count(self, output: Tensor, targets: Tensor) -> tuple[Tensor, Tensor | int]:
        raise NotImplementedError


class LMAccuracy(_Accuracy):
    """Share of the targets (B, T) that are predicted, padding left out.

        accuracy = LMAccuracy(pad_id=0)
        for tokens, targets in loader:
            accuracy.update(model(tokens), targets)
        accuracy.compute()

    Takes logits (B, T, V), of which the largest is the prediction, or predictions (B, T). Costs one pass over the
    logits.
    """

    def __init__(self, pad_id: int = 0) -> None:
        super().__init__()
        self.pad_id = pad_id

    def _count(self, output: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        predicted = output
        if output.dim() == targets.dim() + 1:
            _check_pair(output, targets, classes=True)
            predicted = output.argmax(dim=-1)
        _check_pair(predicted, targets)
        real = targets != self.pad_id
        return ((predicted == targets) & real).sum(), real.sum()


class PixelAccuracy(_Accuracy):
    """Share of pixels on the right side of a two-class mask.

    Takes masks of 0 and 1, and either logits, where above 0 is the object, or predictions that are boolean or integer.
    """

    def _count(self, output: Tensor, targets: Tensor) -> tuple[Tensor, int]:
        _check_pair(output, targets)
        return ((output > 0) == (targets > 0.5)).sum(), targets.numel()


class StreamingMetrics:
    """Accuracy and F1 over classes, from a confusion matrix on the device: 8·classes² bytes, however long the epoch."""

    def __init__(self, classes: int) -> None:
        self.classes = classes
        self.reset()

    def reset(self) -> None:
        self._counts: Tensor | None = None  # (classes²,) by label, then prediction

    def update(self, logits: Tensor, labels: Tensor) -> None:
        """Adds a batch. Nothing waits: unlike `bincount`, adding to cells needs no look at the largest one."""
        if self._counts is None:
            self._counts = torch.zeros(self.classes**2, dtype=torch.int64, device=logits.device)
        cells = labels * self.classes + logits.detach().argmax(dim=1)
        self._counts.scatter_add_(0, cells, torch.ones_like(cells))

    def compute(self) -> dict[str, float]:
        """`accuracy` and `macro_f1` over everything since `reset`. Reads the device once."""
        if self._counts is None:
            return {"accuracy": float("nan"), "macro_f1": float("nan")}
        counts = self._counts.view(self.classes, self.classes).cpu().numpy()
        return class_scores(counts.diagonal(), counts.sum(axis=1), counts.sum(axis=0))


def class_scores(right: np.ndarray, asked: np.ndarray, answered: np.ndarray) -> dict[str, float]:
    """From counts by class. A class that was neither asked for nor answered has no F1 and isn't in the mean."""
    seen = asked + answered > 0
    f1 = 2 * right[seen] / (asked + answered)[seen]
    return {"accuracy": float(right.sum() / asked.sum()), "macro_f1": float(f1.mean())}


def _check_pair(output: Tensor, targets: Tensor, classes: bool = False) -> None:
    """Shapes that differ would broadcast into a wrong number instead of an error."""
    expected = output.shape[:-1] if classes else output.shape
    if expected != targets.shape:
        kind = "all but the last dimension of the logits" if classes else "the same shape"
        raise ValueError(f"output {tuple(output.shape)} and targets {tuple(targets.shape)}: they must share {kind}")
