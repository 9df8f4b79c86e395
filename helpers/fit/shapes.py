"""Shapes of a Llama preset's weights."""

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
