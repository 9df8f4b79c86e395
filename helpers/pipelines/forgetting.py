"""Example forgetting: which samples a network learns and forgets again, counted while it trains.

    tracker = ForgettingTracker(len(dataset), device)
    for indices, images, labels in loader:
        logits = model(images)
        tracker.update(indices, logits=logits, labels=labels)
        ...
    smaller = torch.utils.data.Subset(dataset, tracker.keep(0.7).tolist())

A sample is presented each time it is in a batch. It is forgotten when it was right at one presentation and is wrong at
its next one; it is unforgettable when it was right at some presentation and was never forgotten (Toneva et al., "An
empirical study of example forgetting during deep neural network learning", 2019).

Cost: 16 bytes a sample on the device, 32 once ranks have been merged (20 MB for ImageNet's 1.28 million), and at each
step about twenty small kernels for any batch size: a sort of its indices, four gathers, a scattered addition, and
arithmetic on (B,) tensors. `update` doesn't synchronize, so the step can be captured in a CUDA graph. Methods that read
(`counts`, `ranking`, `keep`, …) synchronize, and return tensors on the CPU.
"""

import math
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

# Columns of the state, int32. Each step only adds to them, so the ranks' additions can be summed.
LAST = 0  # 1 if the sample was right when it was last presented
FORGOTTEN = 1  # number of times it was forgotten
WAITED = 2  # presentations before the first at which it was right
PRESENTED = 3
COLUMNS = 4


class ForgettingTracker:
    """Counts forgetting for samples 0 … `samples` − 1; `device` is that of the training's tensors.

    An index that is twice in a batch counts as two presentations, in the order of the batch.

    An index out of range raises a ValueError: at once if the indices are on the CPU; for indices on a GPU, where the
    check would synchronize, at the next method that reads.
    """

    def __init__(self, samples: int, device: torch.device | str | None = None) -> None:
        if isinstance(samples, bool) or not isinstance(samples, int) or not 1 <= samples < 2**31:
            raise ValueError(f"samples is {samples!r}; it must be a whole number from 1 to 2³¹ − 1")
        self.samples = samples
        # One extra row, for presentations with an index out of range.
        self._state = torch.zeros(samples + 1, COLUMNS, dtype=torch.int32, device=device)
        self._base: Tensor | None = None  # the state when ranks were last merged; None: all zeros
        self._changes = _changes().to(self._state.device)

    @property
    def device(self) -> torch.device:
        return self._state.device

    @torch.no_grad()
    def update(
        self,
        indices: Tensor,
        correct: Tensor | None = None,
        *,
        logits: Tensor | None = None,
        labels: Tensor | None = None,
    ) -> None:
        """Count a batch: `indices` (B,), and `correct` (B,) bool, or `logits` (B, C) with `labels` (B,).

        `correct` must come from the network before its update on this batch. Doesn't synchronize if the tensors are on
        the GPU (or in pinned memory).
        """
        if (correct is None) == (logits is None) or (logits is None) != (labels is None):
            raise ValueError("update takes either correct, or logits and labels")
        if correct is None:
            correct = is_correct(logits, labels)
        indices, correct = self._checked(torch.as_tensor(indices), torch.as_tensor(correct))
        indices, order = indices.sort(stable=True)  # (B,): the presentations of a sample are adjacent, in their order
        correct = correct[order].int()  # (B,)
        state = self._state[indices]  # (B, COLUMNS), before this batch
        # If a sample was presented earlier in this batch, its previous answer is that one and not the stored one.
        first = torch.searchsorted(indices, indices)  # (B,), where the sample's presentations begin
        repeated = first < torch.arange(len(indices), device=self.device)
        before = torch.where(repeated, correct.roll(1), state[:, LAST])
        rights = correct.cumsum(0) - correct  # right answers of all samples, earlier in the sorted batch
        learned = (state[:, WAITED] < state[:, PRESENTED]) | (rights > rights[first])
        rows = correct.add(before, alpha=2).add_(learned, alpha=4)  # (B,), rows of `_changes`
        # Each presentation adds its changes; for repeated samples the changes of LAST add up to the last value.
        self._state.index_add_(0, indices, self._changes[rows])

    def counts(self) -> Tensor:
        """How often each sample was forgotten, (N,); 0 for one that was never learned."""
        return self._read(FORGOTTEN)

    def presentations(self) -> Tensor:
        """How often each sample was presented, (N,)."""
        return self._read(PRESENTED)

    def first_learned(self) -> Tensor:
        """At which of its presentations each sample was first right, (N,): 1 is the first, 0 is never.

        Where every epoch presents every sample once, this is the epoch, from 1.
        """
        waited, presented = self._read(WAITED), self._read(PRESENTED)
        return torch.where(waited < presented, waited + 1, 0)

    def learned(self) -> Tensor:
        """Whether each sample was right at any presentation, (N,) bool."""
        return self.first_learned() > 0

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

    def drop(self, share: float, seed: int = 0) -> Tensor:
        """The indices of the least forgotten samples, a share of all: candidates to leave out."""
        return self.ranking(seed)[: _part(_share(share), self.samples)]

    def keep(self, share: float, seed: int = 0) -> Tensor:
        """The indices of the most forgotten samples, a share of all: the complement of `drop(1 - share)`."""
        return self.ranking(seed)[_part(1 - _share(share), self.samples) :]

    def merge(self, *others: "ForgettingTracker") -> int:
        """Add the counts of `others` since the last merge, or since their creation; `others` aren't changed.

        Exact for samples that only one tracker has seen since then. For samples that several trackers have seen the
        order is unknown: their counts are added, and the sample was right last if it was so on all of them. Returns the
        number of such samples. To continue, load this tracker's `state_dict` into the others.
        """
        base = self._base_or_zeros()
        added = self._added()
        for other in others:
            if other.samples != self.samples:
                raise ValueError(f"a tracker of {other.samples} samples can't be merged into one of {self.samples}")
            if not torch.equal(other._base_or_zeros().to(self.device), base):
                raise ValueError("trackers can be merged if they went on from the same state; these did not")
            added = added + other._added().to(self.device)
        return self._take(base, added)

    def all_reduce(self, group: dist.ProcessGroup | None = None) -> int:
        """`merge` across ranks, after which all have the same counts. One all-reduce of 20 bytes a sample.

        Call it after every epoch: samples change ranks between epochs, and whether one was forgotten depends on its
        previous presentation on another rank. Counts are then those of one process with the same presentations; with
        rarer calls they are wrong. Returns the number of samples that more than one rank has seen since the last call,
        such as those that a `DistributedSampler` repeats to fill its last batch; they aren't exact. Without a process
        group nothing is sent.
        """
        added = self._added()
        if dist.is_available() and dist.is_initialized():
            dist.all_reduce(added, group=group)
        return self._take(self._base_or_zeros(), added)

    def state_dict(self) -> dict[str, Any]:
        """The state for `load_state_dict`, on any device: copies on the CPU."""
        base = None if self._base is None else self._base.cpu().clone()
        return {"state": self._state.cpu().clone(), "base": base}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        for name in ("state", "base"):
            if name not in state:
                raise ValueError(f"the state has no {name!r}; it must be what state_dict returned")
            tensor = state[name]
            if tensor is not None and tuple(tensor.shape) != tuple(self._state.shape):
                raise ValueError(f"the state is of {len(tensor) - 1} samples; this tracker has {self.samples}")
        self._state.copy_(state["state"])
        self._base = None if state["base"] is None else state["base"].to(self.device, torch.int32, copy=True)

    def _checked(self, indices: Tensor, correct: Tensor) -> tuple[Tensor, Tensor]:
        """Both on the device; indices as int64, those out of range pointing to the last row."""
        if indices.dim() != 1 or indices.is_floating_point() or indices.is_complex() or indices.dtype == torch.bool:
            raise ValueError(f"indices are {_described(indices)}; they must be integers of shape (B,)")
        if correct.shape != indices.shape or correct.dtype != torch.bool:
            raise ValueError(f"correct is {_described(correct)}; it must be bool of shape {tuple(indices.shape)}")
        if indices.device.type == "cpu" and len(indices):
            least, most = (int(end) for end in indices.aminmax())
            if least < 0 or most >= self.samples:
                wrong = least if least < 0 else most
                raise ValueError(f"index {wrong} is out of range; it must be from 0 to {self.samples - 1}")
        indices = indices.to(self.device, torch.int64, non_blocking=True)
        indices = indices.clamp(-1, self.samples) % (self.samples + 1)  # -1 and N both become N
        return indices, correct.to(self.device, non_blocking=True)

    def _read(self, column: int) -> Tensor:
        """A column on the CPU, without the row for indices out of range, which must be empty."""
        values = self._state.cpu()
        if outside := int(values[-1, PRESENTED]):
            raise ValueError(f"{outside} presentations had an index out of range: it must be 0 to {self.samples - 1}")
        return values[:-1, column].long()

    def _base_or_zeros(self) -> Tensor:
        return torch.zeros_like(self._state) if self._base is None else self._base

    def _added(self) -> Tensor:
        """Counts since the last merge, (N + 1, 5); the last column is 1 if the sample was seen.

        Column LAST is not a change but the value, for samples that were seen.
        """
        added = self._state.clone() if self._base is None else self._state - self._base
        seen = (added[:, PRESENTED] > 0).int()
        added[:, LAST] = self._state[:, LAST] * seen
        return torch.cat([added, seen[:, None]], dim=1)

    def _take(self, base: Tensor, added: Tensor) -> int:
        """Add the summed counts of all trackers to the base. Returns the number of samples that several have seen."""
        added, seen = added[:, :COLUMNS], added[:, COLUMNS]
        state = base + added
        state[:, LAST] = torch.where(seen > 0, added[:, LAST] == seen, base[:, LAST])
        self._state.copy_(state)
        self._base = state
        return int((seen[:-1] > 1).sum())


def is_correct(logits: Tensor, labels: Tensor) -> Tensor:
    """Whether the largest of each sample's logits (B, C) is its label's, (B,) bool. A NaN among them is wrong."""
    if logits.dim() != 2 or labels.shape != logits.shape[:1]:
        raise ValueError(f"logits are {_described(logits)}, labels {_described(labels)}; they must be (B, C) and (B,)")
    largest, predicted = logits.detach().max(dim=1)  # (B,) each; the largest is NaN if any is
    return (predicted == labels) & ~largest.isnan()


def _changes() -> Tensor:
    """Changes of the columns by a presentation, (8, COLUMNS); row 4·learned + 2·right before + right now."""
    rows = [(bool(n & 4), bool(n & 2), bool(n & 1)) for n in range(8)]
    changes = [(now - before, before and not now, not learned and not now, 1) for learned, before, now in rows]
    return torch.tensor(changes, dtype=torch.int32)


def _share(share: float) -> float:
    if not 0 <= share <= 1:
        raise ValueError(f"share is {share!r}; it must be from 0 to 1")
    return share


def _part(share: float, samples: int) -> int:
    """A share of the samples, half a sample rounded up; 1 − (1 − share) is the same share but for the last bit."""
    return math.floor(round(share * samples, 6) + 0.5)


def _described(tensor: Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')} of shape {tuple(tensor.shape)}"
