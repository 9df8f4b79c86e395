"""Slow equivalents of the models' parts, losses and metrics, for trainings that are slow on purpose.

model = with_slow_gpt_parts(GPT2LikeModel(vocab_size), Faults(separate_qkv=True))    # same weights and function
"""

import math
from collections.abc import Callable

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..metrics import LMAccuracy, class_scores
from ..models import GPT2LikeModel, PositionalEncoding
from ..models.gpt import sinusoids
from ..models.vit import ConvPatches, FusedMixing, FusedProjection, ViT
from .switches import Faults

# The language model's


class RecomputedPositions(PositionalEncoding):
    """Recomputes the table of all positions in each call: sines and cosines in fp64."""

    def forward(self, x: Tensor, positions: Tensor | None = None) -> Tensor:
        self.table = sinusoids(*self.table.shape, device=x.device)
        return super().forward(x, positions)


class DeadProjection(nn.Module):
    """A linear layer, and a square one whose result is unused, so that no gradient reaches it."""

    def __init__(self, used: nn.Linear) -> None:
        super().__init__()
        size, weight = used.in_features, used.weight
        self.used = used
        self.dead = nn.Linear(size, size, bias=False, device=weight.device, dtype=weight.dtype)

    def forward(self, x: Tensor) -> Tensor:
        self.dead(x)
        return self.used(x)


def project_separately(block: nn.MultiheadAttention, x: Tensor, memory: Tensor | None) -> tuple[Tensor, ...]:
    """q, k and v by one product each, with slices of the same weights: the input is read three times."""
    inputs = (x, x, x) if memory is None else (x, memory, memory)
    weights, biases = block.in_proj_weight.chunk(3), block.in_proj_bias.chunk(3)
    return tuple(F.linear(*parts) for parts in zip(inputs, weights, biases, strict=True))


def materialised_attention(hidden: Tensor) -> Callable[..., Tensor]:
    """softmax(q·kᵀ/√D)·v in separate ops, each with a (B, H, T, T) result. `hidden`, (T, T), masks keys."""

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        scores = torch.matmul(q, k.transpose(-1, -2)) * q.shape[-1] ** -0.5  # (B, H, T, T)
        return torch.matmul(torch.softmax(scores.masked_fill(hidden, -math.inf), dim=-1), v)

    return attend


def hidden_keys(tokens: Tensor, positions: Tensor | None) -> Tensor:
    """(T, T), True where the query of a row may not attend to a key: later keys, and those of other documents."""
    length = tokens.shape[1]
    hidden = torch.ones(length, length, dtype=torch.bool, device=tokens.device).triu(1)
    if positions is not None:
        documents = (positions == 0).cumsum(0)  # (T,)
        hidden |= documents[:, None] != documents
    return hidden


class SpelledOutLoss(nn.Module):
    """`LMCrossEntropyLoss` by its definition: softmax, clamp and logarithm make B·T·V fp32 numbers each."""

    def __init__(self, pad_id: int) -> None:
        super().__init__()
        self.pad_id = pad_id

    def forward(self, logits: Tensor, targets: Tensor) -> Tensor:
        probabilities = torch.softmax(logits.float(), dim=-1)  # (B, T, V)
        logarithms = torch.log(probabilities.clamp(min=torch.finfo(torch.float32).tiny))  # log 0 would be -inf
        negative_logs = -logarithms.gather(2, targets[..., None]).squeeze(2)  # (B, T)
        real = targets != self.pad_id
        return (negative_logs * real).sum() / real.sum().clamp(min=1)


class HostAccuracy(LMAccuracy):
    """`LMAccuracy` on the host: each update waits for the device, and copies 16 bytes a token from it."""

    def update(self, output: Tensor, targets: Tensor) -> None:
        super().update(output.argmax(dim=-1).cpu(), targets.cpu())


def with_slow_gpt_parts(model: GPT2LikeModel, faults: Faults) -> GPT2LikeModel:
    """The model, with the slow equivalents of the parts that have `faults`. They take over the weights."""
    if faults.positions_recomputed:
        length, width = model.positions.table.shape
        model.positions = RecomputedPositions(width, length, model.positions.dropout.p)
    if faults.separate_qkv:
        model.project = project_separately
    if faults.dead_projection:
        for layer in model.decoder.layers:
            layer.linear1 = DeadProjection(layer.linear1)
    return model


# The ViT's


class ReshapedPatches(nn.Module):
    """Patches are gathered into (B, T, 3·P·P), and go through a linear layer."""

    def __init__(self, patches: ConvPatches) -> None:
        super().__init__()
        self.patch_size = patches.conv.kernel_size[0]
        weight = patches.conv.weight.flatten(1)
        self.linear = nn.Linear(weight.shape[1], weight.shape[0], device=weight.device, dtype=weight.dtype)
        with torch.no_grad():
            self.linear.weight.copy_(weight)
            self.linear.bias.copy_(patches.conv.bias)

    def forward(self, images: Tensor) -> Tensor:
        size = self.patch_size
        parts = images.unfold(2, size, size).unfold(3, size, size)  # (B, c, s, s, P, P)
        return self.linear(parts.permute(0, 2, 3, 1, 4, 5).flatten(3).flatten(1, 2))


class SeparateProjections(nn.Module):
    """q, k and v by one product each: x is read three times, and each product is too small to fill the device."""

    def __init__(self, fused: FusedProjection) -> None:
        super().__init__()
        self.heads, self.head_dim = fused.heads, fused.head_dim
        weights = fused.linear.weight.detach().chunk(3)
        self.q, self.k, self.v = (
            nn.Linear(w.shape[1], w.shape[0], bias=False, device=w.device, dtype=w.dtype) for w in weights
        )
        with torch.no_grad():
            for linear, weight in zip((self.q, self.k, self.v), weights, strict=True):
                linear.weight.copy_(weight)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        parts = (linear(x).unflatten(2, (self.heads, self.head_dim)) for linear in (self.q, self.k, self.v))
        q, k, v = (part.transpose(1, 2) for part in parts)  # (B, H, T, D)
        return q, k, v


class MaterialisedMixing(nn.Module):
    """softmax(q·kᵀ/√D)·v in separate ops, each with a (B, H, T, T) result, most of which are saved for backward."""

    def __init__(self, fused: FusedMixing) -> None:
        super().__init__()
        self.softmax = nn.Softmax(dim=-1)
        self.dropout = nn.Dropout(fused.dropout)

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        scores = torch.matmul(q, k.transpose(-1, -2)) * q.shape[-1] ** -0.5  # (B, H, T, T)
        return torch.matmul(self.dropout(self.softmax(scores)), v)


def with_slow_vit_parts(model: ViT, faults: Faults) -> ViT:
    """The model, with the slow equivalents of the parts that have `faults`. They take over the weights."""
    if faults.patches_gathered:
        model.patches = ReshapedPatches(model.patches)
    for block in model.blocks:
        if faults.separate_qkv:
            block.attention.qkv = SeparateProjections(block.attention.qkv)
        if faults.materialised_attention:
            block.attention.mix = MaterialisedMixing(block.attention.mix)
    return model


class CollectedMetrics:
    """`StreamingMetrics` with all outputs on the CPU, 4·classes bytes a sample, as scikit-learn's metrics need.

    Computed in each step, it waits for the device each time and does O(n) work, O(n²) over the epoch.
    """

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

        The classes are those that occur, as for a metric that is given arrays only.
        """
        if not self._labels:
            return {"accuracy": float("nan"), "macro_f1": float("nan")}
        predicted = np.concatenate(self._logits).argmax(axis=1)
        labels = np.concatenate(self._labels)
        correct, actual, guessed = np.zeros((3, self.classes))
        for label in np.union1d(labels, predicted):
            correct[label] = ((labels == label) & (predicted == label)).sum()
            actual[label], guessed[label] = (labels == label).sum(), (predicted == label).sum()
        return class_scores(correct, actual, guessed)
