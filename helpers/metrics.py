"""A loss and metrics that ignore padding and never make the host wait for the device.

An `.item()` in each step makes the host wait for the GPU. The metrics here accumulate counts on the device, and only
`compute()` reads them.
"""

import math

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .lab.machine import device


class LMCrossEntropyLoss(nn.Module):
    """Mean cross-entropy of logits (B, T, V) over the targets (B, T) that are not `pad_id`.

    For half-precision logits the softmax is computed in fp32: 4 bytes per logit are saved for backward, which needs 4
    more; at B·T = 32·640 and V = 50,000 that is 3.8 GiB each. In fp16 the sum over V would overflow, and probabilities
    below 6e-8 would be 0. A batch with no real token has loss 0 and gradient 0.
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


def _over_ranks(counts: Tensor) -> Tensor:
    """The sum of counts over torch.distributed's ranks, if it is running; each of them must call it."""
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        torch.distributed.all_reduce(counts)
    return counts


class _Accuracy:
    """The number of right answers and of all answers. An update adds to both on the device, without waiting."""

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
        """The share of right answers since `reset`; nan if there are none. Waits for the device once.

        While torch.distributed runs, it is that of all ranks, and each of them must call it.
        """
        if isinstance(self._right, Tensor):
            counts = torch.stack([self._right, torch.as_tensor(self._counted).to(self._right)])
        else:
            counts = torch.zeros(2, dtype=torch.int64, device=device())  # of a rank without a batch
        right, counted = _over_ranks(counts).tolist()
        return right / counted if counted else math.nan

    def _count(self, output: Tensor, targets: Tensor) -> tuple[Tensor, Tensor | int]:
        raise NotImplementedError


class LMAccuracy(_Accuracy):
    """The share of the targets (B, T), without padding, that are predicted.

        accuracy = LMAccuracy(pad_id=0)
        for tokens, targets in loader:
            accuracy.update(model(tokens), targets)
        accuracy.compute()

    Takes logits (B, T, V) or predictions (B, T). Costs one pass over the logits.
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
    """The share of pixels whose class is predicted, of two.

    Takes masks of 0 and 1, and logits, where above 0 is class 1, or predictions that are boolean or integer.
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
        """Add a batch without waiting; `bincount` would wait, to read the largest value."""
        if logits.shape[1] != self.classes:
            raise ValueError(f"logits are of {logits.shape[1]} classes, not of {self.classes}")
        if self._counts is None:
            self._counts = torch.zeros(self.classes**2, dtype=torch.int64, device=logits.device)
        cells = labels * self.classes + logits.detach().argmax(dim=1)
        self._counts.scatter_add_(0, cells, torch.ones_like(cells))

    def compute(self) -> dict[str, float]:
        """`accuracy` and `macro_f1` over everything since `reset`; nan if that is nothing. Waits for the device once.

        While torch.distributed runs, they are those of all ranks, and each of them must call it.
        """
        if self._counts is None:
            counts = torch.zeros(self.classes**2, dtype=torch.int64, device=device())
        else:
            counts = self._counts.clone()
        counts = _over_ranks(counts).view(self.classes, self.classes).cpu().numpy()
        if not counts.any():
            return {"accuracy": float("nan"), "macro_f1": float("nan")}
        return class_scores(counts.diagonal(), counts.sum(axis=1), counts.sum(axis=0))


def class_scores(right: np.ndarray, labelled: np.ndarray, predicted: np.ndarray) -> dict[str, float]:
    """`accuracy` and `macro_f1` from counts by class. A class that is in neither has no F1 and isn't in the mean."""
    seen = labelled + predicted > 0
    f1 = 2 * right[seen] / (labelled + predicted)[seen]
    return {"accuracy": float(right.sum() / labelled.sum()), "macro_f1": float(f1.mean())}


def _check_pair(output: Tensor, targets: Tensor, classes: bool = False) -> None:
    """Raise a ValueError if the shapes differ, which would broadcast to a wrong result."""
    expected = output.shape[:-1] if classes else output.shape
    if expected != targets.shape:
        kind = "all but the last dimension of the logits" if classes else "the same shape"
        raise ValueError(f"output {tuple(output.shape)} and targets {tuple(targets.shape)}: they must share {kind}")
