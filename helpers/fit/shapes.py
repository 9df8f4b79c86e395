"""Shapes of a Llama preset's weights, and bytes of activations for T tokens, by formula.

The formulas are for the modules that `helpers.distributed` trains: attention without scores in memory, unfused
norms and rotation. d is the width, I the feed-forward's width.
"""

from dataclasses import dataclass

from helpers.models.llama import preset

FP32 = 4  # bytes of a number


@dataclass(frozen=True)
class Shapes:
    """Rows and columns of a model's weights. A norm's weight has one column."""

    vocab: int
    width: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    hidden: int
    max_length: int
    tied: bool

    @classmethod
    def of(cls, name: str) -> "Shapes":
        sizes = preset(name)
        return cls(
            vocab=sizes["vocab_size"],
            width=sizes["width"],
            layers=sizes["layers"],
            heads=sizes["heads"],
            kv_heads=sizes["kv_heads"],
            head_dim=sizes.get("head_dim", sizes["width"] // sizes["heads"]),
            hidden=sizes["feedforward_size"],
            max_length=sizes.get("max_length", 131072),
            tied=sizes.get("tied", True),
        )

    @property
    def block(self) -> list[tuple[int, int]]:
        """Two norms; q, k, v, out; gate, up, down."""
        d, q, kv = self.width, self.heads * self.head_dim, self.kv_heads * self.head_dim
        attention = [(q, d), (kv, d), (kv, d), (d, q)]
        return [(d, 1), *attention, (d, 1), (self.hidden, d), (self.hidden, d), (d, self.hidden)]

    @property
    def table(self) -> tuple[int, int]:
        """The embedding, and the head."""
        return self.vocab, self.width

    @property
    def outside(self) -> list[tuple[int, int]]:
        """Weights outside the blocks."""
        return [self.table, (self.width, 1), *([] if self.tied else [self.table])]

    @property
    def weights(self) -> list[tuple[int, int]]:
        return self.block * self.layers + self.outside


def elements(weights: list[tuple[int, int]]) -> int:
    return sum(rows * columns for rows, columns in weights)


def share(weights: list[tuple[int, int]], ranks: int) -> int:
    """Elements of a rank's shard when each weight's rows are divided over ranks, padded to equal shards."""
    return sum(-(-rows // ranks) * columns for rows, columns in weights)


def largest(weights: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """The largest of the weights, alone."""
    return [max(weights, key=lambda weight: elements([weight]))]


@dataclass(frozen=True)
class Activations:
    """Bytes of a rank's activations for `tokens` tokens, with `itemsize` bytes a number in the compute dtype."""

    shapes: Shapes
    tokens: int
    itemsize: int

    @property
    def stream(self) -> int:
        """One copy of the residual stream (T, d) in the compute dtype."""
        return self.tokens * self.shapes.width * self.itemsize

    @property
    def wide(self) -> int:
        """One copy of the residual stream in fp32."""
        return self.tokens * self.shapes.width * FP32

    @property
    def hidden(self) -> int:
        """One (T, I)."""
        return self.tokens * self.shapes.hidden * self.itemsize

    @property
    def norm(self) -> int:
        """Saved by a norm for backward: its input and x̂ in fp32, a number a row, and its result, for products."""
        return 2 * self.wide + self.tokens * FP32 + self.stream

    @property
    def block(self) -> int:
        """Saved by a block for backward: two norms; rotated q and k, v, attention's result, a number for each row and
        head; gate, SiLU(gate), up and their product. In bf16 24d + 4·kv + 8I + 4·heads + 8 bytes a token."""
        s = self.shapes
        q, kv = s.heads * s.head_dim, s.kv_heads * s.head_dim
        attention = self.tokens * (2 * (q + kv) * self.itemsize + s.heads * FP32)
        return 2 * self.norm + attention + 4 * self.hidden

    @property
    def block_forward(self) -> int:
        """Peak of a block's forward on top of what it saves: input, stream after attention, last product, sum."""
        return 4 * self.stream

    @property
    def block_forward_unsaved(self) -> int:
        """Peak of the forward of a block that saves nothing: the feed-forward's four tensors, input and output."""
        return 4 * self.hidden + 3 * self.stream

    @property
    def feed_forward_backward(self) -> int:
        """Peak of the feed-forward's backward on top of what the block saved: two (T, I) and a stream."""
        return 2 * self.hidden + self.stream

    @property
    def norm_backward(self) -> int:
        """Peak of a norm's backward, including what the norm saved."""
        return 5 * self.wide + 2 * self.stream

    @property
    def logits(self) -> int:
        """(T, V) in the compute dtype."""
        return self.tokens * self.shapes.vocab * self.itemsize

    @property
    def loss(self) -> int:
        """Peak of the loss, in backward: log-probabilities, their gradient and the logits' gradient, in fp32."""
        return 3 * self.tokens * self.shapes.vocab * FP32
