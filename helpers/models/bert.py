"""BERT's encoder: post-norm layers over embeddings of words, positions and segments, and a pooled first token.

The architecture of transformers' `BertModel`, with q, k and v from one product and with
`F.scaled_dot_product_attention`. No control flow depends on the data: it can be traced, scripted and exported.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

# Sizes by name; other arguments have the constructor's defaults.
PRESETS = {
    "tiny": {"vocab_size": 128, "width": 32, "layers": 2, "heads": 2, "feedforward_size": 64, "max_length": 32},
    "bert-base": {"vocab_size": 30522, "width": 768, "layers": 12, "heads": 12, "feedforward_size": 3072},
}

INIT_STD, EPSILON = 0.02, 1e-12


class Bert(nn.Module):
    """Tokens (B, T) to states (B, T, C) and the pooled first token (B, C).

    Every token attends to every other, as in a batch of texts of one length; all are of the first segment. Attention
    never forms the (T, T) scores.

    bert-base has 109,482,240 parameters, 85.6 M of them in products. Forward costs 2·85.0 M FLOP a token in its layers
    and 4·layers·C·T² for attention: 22.4 GFLOP for 128 tokens, 3 % of it in attention. Weights are initialised normal
    with deviation 0.02, biases with 0.
    """

    def __init__(
        self,
        vocab_size: int = 30522,
        width: int = 768,
        layers: int = 12,
        heads: int = 12,
        feedforward_size: int = 3072,
        max_length: int = 512,
        dropout: float = 0.1,
    ) -> None:
        super().__init__()
        self.max_length = max_length
        self.words = nn.Embedding(vocab_size, width)
        self.positions = nn.Embedding(max_length, width)
        self.segments = nn.Embedding(2, width)
        self.norm = nn.LayerNorm(width, EPSILON)
        self.dropout = nn.Dropout(dropout)
        self.layers = nn.ModuleList(Layer(width, heads, feedforward_size, dropout) for _ in range(layers))
        self.pooler = nn.Linear(width, width)
        self.reset_parameters()

    @classmethod
    def from_name(cls, name: str, **changes) -> "Bert":
        """The model of a preset, with changes: `from_name("bert-base", dropout=0.0)`."""
        return cls(**PRESETS[name] | changes)

    def reset_parameters(self) -> None:
        for module in self.modules():
            if isinstance(module, (nn.Linear, nn.Embedding)):
                nn.init.normal_(module.weight, std=INIT_STD)
            if isinstance(module, nn.Linear):
                nn.init.zeros_(module.bias)

    def forward(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        # While tracing, sizes are tensors: comparing them would record nothing and warn.
        if not torch.jit.is_tracing() and tokens.shape[1] > self.max_length:
            raise ValueError(f"the sequence has {tokens.shape[1]} positions, and max_length is {self.max_length}")
        x = self.words(tokens) + self.positions.weight[: tokens.shape[1]]  # (B, T, C)
        x = self.dropout(self.norm(x + self.segments.weight[0]))
        for layer in self.layers:
            x = layer(x)
        return x, torch.tanh(self.pooler(x[:, 0]))


class Layer(nn.Module):
    """norm(x + attention(x)), then norm(x + mlp(x)), on (B, T, C)."""

    def __init__(self, width: int, heads: int, feedforward_size: int, dropout: float) -> None:
        super().__init__()
        self.attention = Attention(width, heads, dropout)
        self.norm1 = nn.LayerNorm(width, EPSILON)
        self.up = nn.Linear(width, feedforward_size)
        self.down = nn.Linear(feedforward_size, width)
        self.norm2 = nn.LayerNorm(width, EPSILON)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm1(x + self.dropout(self.attention(x)))
        return self.norm2(x + self.dropout(self.down(F.gelu(self.up(x)))))


class Attention(nn.Module):
    """Attention of every token to every token: (B, T, C) to (B, T, C)."""

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads, self.dropout = heads, dropout
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        qkv = self.qkv(x).unflatten(2, [3, self.heads, -1])  # (B, T, 3, H, D)
        q, k, v = qkv.permute(2, 0, 3, 1, 4).unbind(0)  # each (B, H, T, D)
        dropout = self.dropout if self.training else 0.0
        mixed = F.scaled_dot_product_attention(q, k, v, dropout_p=dropout)
        return self.out(mixed.transpose(1, 2).flatten(2))


class Classifier(nn.Module):
    """Tokens (B, T) to logits (B, classes): a linear head on the pooled first token."""

    def __init__(self, encoder: Bert, classes: int = 2) -> None:
        super().__init__()
        self.encoder = encoder
        self.head = nn.Linear(encoder.pooler.out_features, classes)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.encoder(tokens)[1])
