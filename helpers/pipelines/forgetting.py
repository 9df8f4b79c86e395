"""Example forgetting: which samples a network learns and forgets again, counted while it trains.

    tracker = ForgettingTracker(len(dataset), device)
    for indices, images, labels in loader:
        logits = model(images)
        tracker.update(indices, is_correct(logits, labels))
        ...
    smaller = torch.utils.data.Subset(dataset, tracker.keep(0.7).tolist())

A sample is presented each time it is in a batch. It is forgotten when it was right at one presentation and is wrong at
its next one; it is unforgettable when it was right at some presentation and was never forgotten (Toneva et al., "An
empirical study of example forgetting during deep neural network learning", 2019).

Cost: 16 bytes a sample on the device (20 MB for ImageNet's 1.28 million), and at each
step about twenty small kernels for any batch size: a sort of its indices, four gathers, a scattered addition, and
arithmetic on (B,) tensors. `update` doesn't synchronize, so the step can be captured in a CUDA graph. Methods that read
(`counts`, `ranking`, `keep`, …) synchronize, and return tensors on the CPU.
"""

import math

import torch
from torch import Tensor

from ..lab.arguments import check_at_least

# Columns of the state, int32. Each step only adds to them.
LAST = 0  # 1 if the sample was right when it was last presented
FORGOTTEN = 1  # number of times it was forgotten
WAITED = 2  # presentations before the first at which it was right
PRESENTED = 3
COLUMNS = 4


class ForgettingTracker:
    """Counts forgetting for samples 0 … `samples` − 1; `device` is that of the training's tensors.

    An index that is twice in a batch counts as two presentations, in the order of the batch.
    """

    def __init__(self, samples: int, device: torch.device | str | None = None) -> None:
        check_at_least(1, samples=samples)
        self.samples = samples
        self._state = torch.zeros(samples, COLUMNS, dtype=torch.int32, device=device)
        self._changes = _changes().to(self._state.device)

    @torch.no_grad()
    def update(self, indices: Tensor, correct: Tensor) -> None:
        """Count a batch: `indices` (B,), and `correct` (B,) bool, as by `is_correct`.

        `correct` must come from the network before its update on this batch. Doesn't synchronize if the tensors are on
        the GPU (or in pinned memory).
        """
        if indices.dim() != 1 or correct.shape != indices.shape or correct.dtype != torch.bool:
            shapes = f"indices {tuple(indices.shape)}, correct {correct.dtype} {tuple(correct.shape)}"
            raise ValueError(f"{shapes}; both are (B,), and correct is bool")
        indices = indices.to(self._state.device, torch.int64, non_blocking=True)
        correct = correct.to(self._state.device, non_blocking=True)
        indices, order = indices.sort(stable=True)  # (B,): the presentations of a sample are adjacent, in their order
        correct = correct[order].int()  # (B,)
        state = self._state[indices]  # (B, COLUMNS), before this batch
        # If a sample was presented earlier in this batch, its previous answer is that one and not the stored one.
        first = torch.searchsorted(indices, indices)  # (B,), where the sample's presentations begin
        repeated = first < torch.arange(len(indices), device=self._state.device)
        before = torch.where(repeated, correct.roll(1), state[:, LAST])
        rights = correct.cumsum(0) - correct  # right answers of all samples, earlier in the sorted batch
        learned = (state[:, WAITED] < state[:, PRESENTED]) | (rights > rights[first])
        rows = correct.add(before, alpha=2).add_(learned, alpha=4)  # (B,), rows of `_changes`
        # Each presentation adds its changes; for repeated samples the changes of LAST add up to the last value.
        self._state.index_add_(0, indices, self._changes[rows])

    def counts(self) -> Tensor:
        """How often each sample was forgotten, (N,); 0 for one that was never learned."""
        return self._read(FORGOTTEN)

    def learned(self) -> Tensor:
        """Whether each sample was right at any presentation, (N,) bool."""
        return self._read(WAITED) < self._read(PRESENTED)

    def unforgettable(self) -> Tensor:
        """The indices of samples that were learned and never forgotten, ascending."""
        return torch.nonzero(self.learned() & (self.counts() == 0))[:, 0]

    def ranking(self, seed: int = 0) -> Tensor:
        """All indices, from the least to the most forgotten, (N,).

        Samples that were never learned, or never presented, rank as most forgotten. Ties are broken at random, by
        `seed`, in the same way on every device: most counts are 0, and an order by index would follow the data set's.
        """
        counts = torch.where(self.learned(), self.counts(), torch.iinfo(torch.int32).max)
        shuffled = torch.randperm(self.samples, generator=torch.Generator().manual_seed(seed))
        return shuffled[counts[shuffled].argsort(stable=True)]

    def keep(self, share: float, seed: int = 0) -> Tensor:
        """The indices of the most forgotten samples, a share of all: the others are candidates to leave out."""
        if not 0 <= share <= 1:
            raise ValueError(f"share is {share!r}; it must be from 0 to 1")
        dropped = math.floor(round((1 - share) * self.samples, 6) + 0.5)  # half a sample is rounded up
        return self.ranking(seed)[dropped:]

    def _read(self, column: int) -> Tensor:
        return self._state[:, column].cpu().long()


def is_correct(logits: Tensor, labels: Tensor) -> Tensor:
    """Whether the largest of each sample's logits (B, C) is its label's, (B,) bool. A NaN among them is wrong."""
    largest, predicted = logits.detach().max(dim=1)  # (B,) each; the largest is NaN if any is
    return (predicted == labels) & ~largest.isnan()


def _changes() -> Tensor:
    """Changes of the columns by a presentation, (8, COLUMNS); row 4·learned + 2·right before + right now."""
    rows = [(bool(n & 4), bool(n & 2), bool(n & 1)) for n in range(8)]
    changes = [(now - before, before and not now, not learned and not now, 1) for learned, before, now in rows]
    return torch.tensor(changes, dtype=torch.int32)
