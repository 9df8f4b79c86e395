"""Slow twins of the language model's parts, which compute the same.

    slow = with_twins(GPT2LikeModel(vocab_size), fixes=frozenset())      # same weights, same function, more kernels
    GPT2LikeModel(vocab_size).load_state_dict(plain_state(slow.state_dict()))

`plain_state` works on gradients by name, too: that is how the tests compare them.
"""

import math
from collections.abc import Callable, Mapping

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from helpers.metrics import LMAccuracy
from helpers.models import GPT2LikeModel, PositionalEncoding
from helpers.models.gpt import sinusoids


class RecomputedPositions(PositionalEncoding):
    """The whole table anew in each call: sines and cosines in fp64, of all positions that there may be."""

    def forward(self, x: Tensor, positions: Tensor | None = None) -> Tensor:
        self.table = sinusoids(*self.table.shape, device=x.device)
        return super().forward(x, positions)


class DeadProjection(nn.Module):
    """A linear layer, and beside it a square one whose result nobody reads. No gradient reaches that."""

    def __init__(self, used: nn.Linear) -> None:
        super().__init__()
        size, weight = used.in_features, used.weight
        self.used = used
        self.dead = nn.Linear(size, size, bias=False, device=weight.device, dtype=weight.dtype)

    def forward(self, x: Tensor) -> Tensor:
        self.dead(x)
        return self.used(x)


def project_separately(block: nn.MultiheadAttention, x: Tensor, memory: Tensor | None) -> tuple[Tensor, ...]:
    """q, k and v by a product each, with slices of the same weights: inputs are read once for each product."""
    inputs = (x, x, x) if memory is None else (x, memory, memory)
    weights, biases = block.in_proj_weight.chunk(3), block.in_proj_bias.chunk(3)
    return tuple(F.linear(*parts) for parts in zip(inputs, weights, biases, strict=True))


def materialised_attention(hidden: Tensor) -> Callable[..., Tensor]:
    """softmax(q·kᵀ/√D)·v step by step: each makes (B, H, T, T) numbers. `hidden`, (T, T), is what is not looked at."""

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        scores = torch.matmul(q, k.transpose(-1, -2)) * q.shape[-1] ** -0.5  # (B, H, T, T)
        return torch.matmul(torch.softmax(scores.masked_fill(hidden, -math.inf), dim=-1), v)

    return attend


def hidden_keys(tokens: Tensor, positions: Tensor | None) -> Tensor:
    """(T, T) True where a query, the row, may not look: at keys after it, and at those of other documents."""
    length = tokens.shape[1]
    hidden = torch.ones(length, length, dtype=torch.bool, device=tokens.device).triu(1)
    if positions is not None:
        documents = (positions == 0).cumsum(0)  # (T,)
        hidden |= documents[:, None] != documents
    return hidden


class SpelledOutLoss(nn.Module):
    """`LMCrossEntropyLoss` as its definition reads: softmax, limit and logarithm make B·T·V fp32 numbers each."""

    def __init__(self, pad_id: int) -> None:
        super().__init__()
        self.pad_id = pad_id

    def forward(self, logits: Tensor, targets: Tensor) -> Tensor:
        probabilities = torch.softmax(logits.float(), dim=-1)  # (B, T, V)
        logarithms = torch.log(probabilities.clamp(min=torch.finfo(torch.float32).tiny))  # log 0 would be -inf
        surprise = -logarithms.gather(2, targets[..., None]).squeeze(2)  # (B, T)
        real = targets != self.pad_id
        return (surprise * real).sum() / real.sum().clamp(min=1)


class HostAccuracy(LMAccuracy):
    """`LMAccuracy` counted on the host: each update waits for the device, and copies 16 bytes a token from it."""

    def update(self, output: Tensor, targets: Tensor) -> None:
        super().update(output.argmax(dim=-1).cpu(), targets.cpu())


def with_twins(model: GPT2LikeModel, fixes: frozenset[str]) -> GPT2LikeModel:
    """The model, with a slow twin of each part that is not fixed. The twins take over the weights."""
    if "positions_once" not in fixes:
        length, width = model.positions.table.shape
        model.positions = RecomputedPositions(width, length, model.positions.dropout.p)
    if "fused_qkv" not in fixes:
        model.project = project_separately
    if "no_dead_projection" not in fixes:
        for layer in model.decoder.layers:
            layer.linear1 = DeadProjection(layer.linear1)
    return model


def plain_state(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Weights, or gradients, of any mixture of twins under the names that `GPT2LikeModel` has."""
    return {name.replace("linear1.used.", "linear1."): state[name] for name in state if "linear1.dead." not in name}
