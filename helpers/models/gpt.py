"""A GPT-2-like language model built from `nn.TransformerDecoder`, and its sinusoidal positions."""

import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

INIT_STD = 0.02  # GPT-2's


class PositionalEncoding(nn.Module):
    """Adds sin(p / 10000^(2i/C)) and cos of the same to channels 2i and 2i + 1 of position p, then dropout.

    The table (max_length, C) is computed once, in fp64, and is not in the state dict. A call costs one addition.
    """

    def __init__(self, d_model: int, max_length: int = 5000, dropout: float = 0.0) -> None:
        super().__init__()
        self.dropout = nn.Dropout(dropout)
        self.register_buffer("table", sinusoids(max_length, d_model), persistent=False)  # (max_length, C)

    def forward(self, x: Tensor, positions: Tensor | None = None) -> Tensor:
        """x is (B, T, C). `positions`, (T,) or (B, T), replace 0 … T−1 for packed documents."""
        limit, length = len(self.table), x.shape[1]
        if positions is not None:
            added = F.embedding(positions, self.table)
        elif length > limit:
            raise ValueError(f"the sequence has {length} positions, and max_length is {limit}")
        else:
            added = self.table[:length]
        return self.dropout(x + added.to(x.dtype))


def sinusoids(length: int, channels: int, device: torch.device | None = None) -> Tensor:
    """The table of `PositionalEncoding`, (length, channels) in fp32, computed in fp64."""
    positions = torch.arange(length, dtype=torch.float64, device=device)[:, None]
    rates = 10000 ** (-torch.arange(0, channels, 2, dtype=torch.float64, device=device) / channels)
    table = torch.empty(length, channels, device=device)
    table[:, 0::2] = (positions * rates).sin()
    table[:, 1::2] = (positions * rates[: channels // 2]).cos()
    return table


def project(block: nn.MultiheadAttention, x: Tensor, memory: Tensor | None) -> tuple[Tensor, ...]:
    """q from x, k and v from `memory`, or from x if that is None: each (B, T, C). One product for each input."""
    weight, bias, size = block.in_proj_weight, block.in_proj_bias, block.embed_dim  # (3C, C), (3C,), C
    if memory is None:
        return F.linear(x, weight, bias).chunk(3, dim=-1)
    q = F.linear(x, weight[:size], bias[:size])
    return q, *F.linear(memory, weight[size:], bias[size:]).chunk(2, dim=-1)


class GPT2LikeModel(nn.Module):
    """Tokens (B, T) to logits (B, T, V) of the token after each: embedding, positions, decoder layers, linear head.

    The memory that `nn.TransformerDecoder` needs is the embedded sequence itself, under the same causal mask: each
    layer attends to its own states and to the embeddings. (A constant memory of one token would also be causal, but
    cross-attention over one key returns its value for any query: two products a layer would compute a bias.) Compared
    with a GPT-2 block this costs 4·C² parameters and a second attention per layer.

    With padding on the right, the causal mask hides it from all real positions. No padding mask is needed, and
    attention takes its fast causal path, which never forms the (T, T) scores. A row of only padding gives finite
    logits, which the loss ignores.

    Weights are initialised normal with deviation 0.02, those that end a residual branch smaller by √(branches), biases
    with 0. The embedding is multiplied by √C, so that words and positions start with comparable sizes. `tied` shares
    the embedding's weight with the head. `attention_dropout`, of the attention weights, defaults to `dropout`; fused
    kernels for packed documents don't support it and need 0.
    """

    # q, k and v in calls with `attend`; chapter 3 replaces it by slower products.
    project = staticmethod(project)

    def __init__(
        self,
        vocab_size: int,
        d_model: int = 768,
        num_heads: int = 12,
        num_layers: int = 12,
        max_length: int = 640,
        dropout: float = 0.1,
        pad_id: int = 0,
        *,
        tied: bool = True,
        attention_dropout: float | None = None,
    ) -> None:
        super().__init__()
        self.pad_id, self.num_heads = pad_id, num_heads
        self.embedding = nn.Embedding(vocab_size, d_model)
        self.positions = PositionalEncoding(d_model, max_length, dropout)
        layer = nn.TransformerDecoderLayer(
            d_model, num_heads, 4 * d_model, dropout, activation="gelu", batch_first=True, norm_first=True
        )
        if attention_dropout is not None:
            layer.self_attn.dropout = layer.multihead_attn.dropout = attention_dropout
        self.decoder = nn.TransformerDecoder(layer, num_layers, norm=nn.LayerNorm(d_model))
        self.head = nn.Linear(d_model, vocab_size, bias=False)
        if tied:
            self.head.weight = self.embedding.weight
        # Floating point: with boolean masks nn.MultiheadAttention forms all scores in evaluation.
        causal = torch.full((max_length, max_length), -math.inf).triu(1)
        self.register_buffer("causal", causal, persistent=False)  # (max_length, max_length)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """GPT-2's initialisation, for three residual branches a layer instead of two."""
        branches = 3 * self.decoder.num_layers
        for name, parameter in self.named_parameters():
            if parameter.dim() > 1:
                ends_branch = name.endswith(("out_proj.weight", "linear2.weight"))
                nn.init.normal_(parameter, std=INIT_STD / math.sqrt(branches) if ends_branch else INIT_STD)
            elif name.endswith("bias"):
                nn.init.zeros_(parameter)

    def forward(
        self, tokens: Tensor, positions: Tensor | None = None, attend: Callable[..., Tensor] | None = None
    ) -> Tensor:
        """Logits (B, T, V) of tokens (B, T).

        Packed documents need `positions`, which restart at 0 in each document, and `attend`.

        `attend(q, k, v)` takes the place of the scores, softmax and weighted sum in all attentions, and sees to their
        mask, the causal one too; q, k, v and what it returns are (B, heads, T, head_dim). In training with attention
        dropout p it is called as `attend(q, k, v, p)`. Forward hooks of the layers and of their `nn.MultiheadAttention`
        are not run on this path, those of the modules inside them are.
        """
        x = F.embedding(tokens, self.embedding.weight) * math.sqrt(self.embedding.embedding_dim)
        x = self.positions(x, positions)  # (B, T, C)
        if attend is not None:
            return self.head(self._decode(x, attend))
        scores = self.causal[: tokens.shape[1], : tokens.shape[1]]
        x = self.decoder(x, x, scores, scores, tgt_is_causal=True, memory_is_causal=True)
        return self.head(x)  # (B, T, V)

    def _decode(self, x: Tensor, attend: Callable[..., Tensor]) -> Tensor:
        """`self.decoder`'s computation with `attend` as attention: x is (B, T, C)."""
        memory = x
        for layer in self.decoder.layers:
            x = x + layer.dropout1(self._attention(layer.self_attn, layer.norm1(x), None, attend))
            x = x + layer.dropout2(self._attention(layer.multihead_attn, layer.norm2(x), memory, attend))
            hidden = layer.dropout(layer.activation(layer.linear1(layer.norm3(x))))  # (B, T, 4C)
            x = x + layer.dropout3(layer.linear2(hidden))
        return self.decoder.norm(x)

    def _attention(
        self, block: nn.MultiheadAttention, x: Tensor, memory: Tensor | None, attend: Callable[..., Tensor]
    ) -> Tensor:
        """The block's projections around `attend`: queries from x, keys and values from `memory`, or x if None."""
        parts = self.project(block, x, memory)
        q, k, v = (part.unflatten(-1, (block.num_heads, -1)).transpose(1, 2) for part in parts)
        dropout = block.dropout if block.training else 0.0
        out = attend(q, k, v, dropout) if dropout else attend(q, k, v)  # (B, heads, T, head_dim)
        return block.out_proj(out.transpose(1, 2).flatten(2))
