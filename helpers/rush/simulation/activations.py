"""Bytes that the blocks, the norms and the head of a Llama make of T tokens, by formula.

For the plain parts that `helpers.rush.distributed` trains with: attention that forms no scores, norms and rotation in
single operations. d is the width, I the feed-forward's, s the bytes of a number in the type of compute.
"""

from dataclasses import dataclass

from .shapes import Shapes

FP32 = 4


@dataclass(frozen=True)
class Activations:
    shapes: Shapes
    tokens: int
    itemsize: int

    @property
    def stream(self) -> int:
        """One copy of the residual stream (T, d) in the type of compute."""
        return self.tokens * self.shapes.width * self.itemsize

    @property
    def wide(self) -> int:
        """One copy of it in fp32."""
        return self.tokens * self.shapes.width * FP32

    @property
    def hidden(self) -> int:
        """One (T, I)."""
        return self.tokens * self.shapes.hidden * self.itemsize

    @property
    def norm(self) -> int:
        """What a norm keeps: its input and x̂ in fp32, a number a row, and its result, for the products that follow."""
        return 2 * self.wide + self.tokens * FP32 + self.stream

    @property
    def block(self) -> int:
        """What a block keeps: two norms; rotated q and k, v, attention's result, a number for each row and head;
        gate, SiLU(gate), up and their product. In bf16 24d + 4·kv + 8I + 4·heads + 8 bytes a token."""
        s = self.shapes
        q, kv = s.heads * s.head_dim, s.kv_heads * s.head_dim
        attention = self.tokens * (2 * (q + kv) * self.itemsize + s.heads * FP32)
        return 2 * self.norm + attention + 4 * self.hidden

    @property
    def block_forward(self) -> int:
        """What a block has at most beside what it keeps: its input, the stream between, the last product, the sum."""
        return 4 * self.stream

    @property
    def block_forward_unkept(self) -> int:
        """What a block that keeps nothing has at most: in the feed-forward, its four tensors, input and output."""
        return 4 * self.hidden + 3 * self.stream

    @property
    def feed_forward_backward(self) -> int:
        """What the feed-forward's backward makes at most, beside what the block kept: two of (T, I)."""
        return 2 * self.hidden + self.stream

    @property
    def norm_backward(self) -> int:
        """What a norm's backward has at most, with what it kept."""
        return 5 * self.wide + 2 * self.stream

    @property
    def logits(self) -> int:
        """(T, V) in the type of compute."""
        return self.tokens * self.shapes.vocab * self.itemsize

    @property
    def loss(self) -> int:
        """The loss at its worst, in backward: log-probabilities, their gradient and the logits', in fp32."""
        return 3 * self.tokens * self.shapes.vocab * FP32
