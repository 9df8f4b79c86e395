"""Shapes of a Llama's weights."""

import functools
from dataclasses import dataclass

import torch

from helpers.models import Llama

FP32 = 4  # bytes of a number

Weights = list[tuple[int, int]]  # rows and columns of each; a norm's weight has one column


@dataclass(frozen=True)
class Shapes:
    """Rows and columns of a model's weights: of the embedding (and the head), of a block, and of all."""

    table: tuple[int, int]
    block: Weights
    layers: int
    tied: bool
    weights: Weights

    @classmethod
    @functools.cache
    def of(cls, name: str, layers: int | None = None) -> "Shapes":
        """The shapes of a preset, which is built without memory."""
        with torch.device("meta"):
            model = Llama.from_name(name, **({"layers": layers} if layers else {}))
        block, weights = (
            [(len(weight), weight[0].numel()) for weight in module.parameters()] for module in (model.layers[0], model)
        )
        tied = model.head.weight is model.embedding.weight
        return cls(tuple(model.embedding.weight.shape), block, len(model.layers), tied, weights)

    @property
    def width(self) -> int:
        return self.table[1]

    @property
    def last(self) -> Weights:
        """The final norm with the head, which are gathered together; a tied head is the embedding, too."""
        return [self.table, (self.width, 1)]


def elements(weights: Weights) -> int:
    return sum(rows * columns for rows, columns in weights)


def share(weights: Weights, ranks: int) -> int:
    """Elements of a rank's shard when each weight's rows are divided over ranks, padded to equal shards."""
    return sum(-(-rows // ranks) * columns for rows, columns in weights)
