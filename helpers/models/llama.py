"""Llama 3: RMSNorm, rotary positions with the 3.1/3.2 scaling, grouped-query attention, SwiGLU.

The parts that faster ones can replace are arguments of `Llama`: attention, norm, rotation, feed-forward layer, and
whether products with the same input are fused. The defaults are plain torch, with whatever autograd saves for them.
"""

import math
import tomllib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor


@dataclass(frozen=True, kw_only=True)
class RopeScaling:
    """Llama 3.1's extension of rotary positions beyond the length of its first training.

    Waves longer than `original_length / low` positions turn `factor` times slower, those shorter than
    `original_length / high` as before, and in between the rate goes from one to the other.
    """

    factor: float
    low: float = 1.0
    high: float = 4.0
    original_length: int = 8192


# The arguments of each size by its name
PRESETS: dict[str, dict[str, Any]] = tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))
for _size in PRESETS.values():
    _size |= {"scaling": RopeScaling(**_size["scaling"])} if "scaling" in _size else {}

INIT_STD = 0.02


def eager_attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None) -> Tensor:
    """softmax(q·kᵀ/√D + mask)·v; q is (B, H, T, D), k and v (B, H / n, T, D).

    Forms all H·T² scores, of which autograd saves about two copies. `mask` has -inf where a key is hidden; the default
    is a causal one.
    """
    groups = q.shape[1] // k.shape[1]
    k, v = (part.repeat_interleave(groups, dim=1) for part in (k, v))  # (B, H, T, D)
    mask = causal_mask(q.shape[2], q) if mask is None else mask
    scores = q @ k.transpose(2, 3) * q.shape[-1] ** -0.5 + mask.to(q.dtype)  # (B, H, T, T)
    return scores.softmax(dim=-1, dtype=torch.float32).to(q.dtype) @ v


def causal_mask(length: int, like: Tensor) -> Tensor:
    """(T, T): -inf where a key comes after the query, else 0."""
    return torch.full((length, length), -math.inf, dtype=like.dtype, device=like.device).triu(1)


def eager_rms_norm(x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
    """x / √(mean x² + ε) · weight over the last dimension, computed in fp32 and returned in the type of x."""
    wide = x.float()
    return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + epsilon) * weight).to(x.dtype)


def rates(head_dim: int, theta: float, scaling: RopeScaling | None) -> Tensor:
    """Each pair of channels' rotation from one position to the next, in radians: (head_dim / 2,) in fp64."""
    rate = theta ** (-torch.arange(0, head_dim, 2, dtype=torch.float64, device="cpu") / head_dim)
    if scaling is None:
        return rate
    waves = rate * scaling.original_length / (2 * math.pi)  # periods within the original length
    share = ((waves - scaling.low) / (scaling.high - scaling.low)).clamp(0, 1)  # 1: unchanged, 0: divided by factor
    return rate * (share + (1 - share) / scaling.factor)


def eager_rotate(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """Rotate channels i and i + D/2 of q (B, T, H, D) and k by the angle of their position; cos, sin are (T, D/2) fp32.

    Computed in fp32: in bf16 neighbouring positions of a long sequence would be the same.
    """
    return _turn(q, cos[:, None], sin[:, None]), _turn(k, cos[:, None], sin[:, None])


def _turn(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    a, b = x.float().chunk(2, dim=-1)  # (B, T, H, D/2)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1).to(x.dtype)


class Positions(nn.Module):
    """cos and sin of every position's angles, (max_length, D/2) each: fp32 whatever type the model is cast to."""

    def __init__(self, head_dim: int, max_length: int, theta: float, scaling: RopeScaling | None) -> None:
        super().__init__()
        self.arguments = (head_dim, theta, scaling)
        for name in ("cos", "sin"):
            self.register_buffer(name, torch.empty(max_length, head_dim // 2), persistent=False)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Compute the tables; needed after `to_empty`, which leaves them undefined."""
        if self.cos.is_meta:
            return
        rate = rates(*self.arguments).to(self.cos.device)
        angles = torch.arange(len(self.cos), dtype=torch.float64, device=rate.device)[:, None] * rate
        self.cos, self.sin = angles.cos().float(), angles.sin().float()

    def _apply(self, fn, recurse: bool = True) -> "Positions":
        super()._apply(fn, recurse)
        if self.cos.dtype != torch.float32:
            self.reset_parameters()
        return self

    def forward(self, length: int) -> tuple[Tensor, Tensor]:
        if length > len(self.cos):
            raise ValueError(f"the sequence has {length} positions, and max_length is {len(self.cos)}")
        return self.cos[:length], self.sin[:length]


class RMSNorm(nn.Module):
    """RMSNorm with a weight for each channel, computed by `normalise(x, weight, epsilon)`."""

    def __init__(self, width: int, epsilon: float, normalise: Callable[..., Tensor] = eager_rms_norm) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.epsilon, self.normalise = epsilon, normalise

    def forward(self, x: Tensor) -> Tensor:
        return self.normalise(x, self.weight, self.epsilon)


class SwiGLU(nn.Module):
    """down(SiLU(gate x) ⊙ up x); `fused` computes gate and up in one product of twice the width."""

    def __init__(self, width: int, hidden: int, fused: bool = False) -> None:
        super().__init__()
        self.fused = fused
        if fused:
            self.gate_up = nn.Linear(width, 2 * hidden, bias=False)
        else:
            self.gate, self.up = (nn.Linear(width, hidden, bias=False) for _ in range(2))
        self.down = nn.Linear(hidden, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.gate_up(x).chunk(2, dim=-1) if self.fused else (self.gate(x), self.up(x))
        return self.down(F.silu(gate) * up)


class Attention(nn.Module):
    """Grouped-query attention: `heads` queries share `kv_heads` keys and values."""

    def __init__(self, width: int, heads: int, kv_heads: int, head_dim: int, *, attend, rotate, fused: bool) -> None:
        super().__init__()
        self.head_dim, self.attend, self.rotate = head_dim, attend, rotate
        self.sizes = [heads * head_dim, kv_heads * head_dim, kv_heads * head_dim]
        self.fused = fused
        if fused:
            self.qkv = nn.Linear(width, sum(self.sizes), bias=False)
        else:
            self.q, self.k, self.v = (nn.Linear(width, size, bias=False) for size in self.sizes)
        self.out = nn.Linear(heads * head_dim, width, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, mask: Tensor | None = None) -> Tensor:
        parts = self.qkv(x).split(self.sizes, dim=-1) if self.fused else (self.q(x), self.k(x), self.v(x))
        q, k, v = (part.unflatten(-1, (-1, self.head_dim)) for part in parts)  # (B, T, heads, D)
        q, k = self.rotate(q, k, cos, sin)
        out = self.attend(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), mask)  # (B, H, T, D)
        return self.out(out.transpose(1, 2).flatten(2))


class Block(nn.Module):
    """x + attention(norm(x)), then x + mlp(norm(x)), on (B, T, width)."""

    def __init__(self, norm1: RMSNorm, attention: Attention, norm2: RMSNorm, mlp: nn.Module, add_normalise) -> None:
        super().__init__()
        self.norm1, self.attention, self.norm2, self.mlp = norm1, attention, norm2, mlp
        self.add_normalise = add_normalise

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, mask: Tensor | None = None) -> Tensor:
        branch = self.attention(self.norm1(x), cos, sin, mask)
        if self.add_normalise is None:
            x = x + branch
            return x + self.mlp(self.norm2(x))
        normed, x = self.add_normalise(x, branch, self.norm2.weight, self.norm2.epsilon)
        return x + self.mlp(normed)


class Llama(nn.Module):
    """Tokens (B, T) to logits (B, T, V) of the token after each.

    Weights are initialised normal with deviation 0.02, those that end a residual branch smaller by √(2·layers), norms
    with 1. They don't depend on the parts: models of one size start from the same weights on one device.
    The parts and their arguments:
        attend     (q, k, v, mask): (B, H, T, D), twice (B, kv_heads, T, D), None or (T, T) added to the scores
        normalise  (x, weight, epsilon); add_normalise, if given, (x, branch, weight, epsilon): that of the sum, the sum
        rotate     (q, k, cos, sin): (B, T, H, D), (B, T, kv_heads, D), twice (T, D/2)
        mlp        (width, feedforward_size): makes a module; None is `SwiGLU`
        fused      q, k and v are one product, gate and up another
        residual   the type of the residual stream; None is the embedding's

    If `checkpoint` is set, blocks are run by `checkpoint(block, *arguments)`.
    """

    def __init__(
        self,
        vocab_size: int,
        width: int,
        layers: int,
        heads: int,
        kv_heads: int,
        feedforward_size: int,
        *,
        max_length: int = 131072,
        theta: float = 500000.0,
        scaling: RopeScaling | None = None,
        tied: bool = True,
        epsilon: float = 1e-5,
        attend: Callable[..., Tensor] = eager_attention,
        normalise: Callable[..., Tensor] = eager_rms_norm,
        add_normalise: Callable[..., tuple[Tensor, Tensor]] | None = None,
        rotate: Callable[..., tuple[Tensor, Tensor]] = eager_rotate,
        mlp: Callable[[int, int], nn.Module] | None = None,
        fused: bool = False,
        residual: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        if heads % kv_heads:
            raise ValueError(f"heads is {heads}; it must be a multiple of kv_heads, {kv_heads}")
        if width % heads:
            raise ValueError(f"width is {width}; it must be a multiple of heads, {heads}")
        head_dim = width // heads
        self.residual, self.checkpoint = residual, None
        self.masked = attend is eager_attention  # it needs a mask, made once a pass instead of in every layer
        self.embedding = nn.Embedding(vocab_size, width)
        self.positions = Positions(head_dim, max_length, theta, scaling)

        def block() -> Block:
            norm1, norm2 = (RMSNorm(width, epsilon, normalise) for _ in range(2))
            attention = Attention(width, heads, kv_heads, head_dim, attend=attend, rotate=rotate, fused=fused)
            feed = SwiGLU(width, feedforward_size, fused) if mlp is None else mlp(width, feedforward_size)
            return Block(norm1, attention, norm2, feed, add_normalise)

        self.layers = nn.ModuleList(block() for _ in range(layers))
        self.norm = RMSNorm(width, epsilon, normalise)
        self.head = nn.Linear(width, vocab_size, bias=False)
        if tied:
            self.head.weight = self.embedding.weight
        self.reset_parameters()

    @classmethod
    def from_name(cls, name: str, **changes) -> "Llama":
        """The model of a preset, with changes: `from_name("llama-3.2-1b", layers=2)`."""
        return cls(**preset(name) | changes)

    @torch.no_grad()
    def reset_parameters(self, generator: torch.Generator | None = None) -> None:
        """Initialise weights and tables of positions. Needs memory for a second copy of one weight at a time."""
        self.positions.reset_parameters()
        for name, weight in self.weights().items():
            if weight.is_meta or isinstance(weight, FakeTensor):  # which have no numbers
                continue
            if weight.dim() == 1:
                weight.fill_(1)
                continue
            ends_branch = name.endswith(("o_proj.weight", "down_proj.weight"))
            std = INIT_STD / math.sqrt(2 * len(self.layers)) if ends_branch else INIT_STD
            drawn = torch.empty(weight.shape, device=weight.device)
            weight.copy_(drawn.normal_(std=std, generator=generator))

    def weights(self, of: Callable[[Tensor], Tensor] = Tensor.detach) -> dict[str, Tensor]:
        """Views of the weights, (out, in), by transformers' names, whatever the parts are.

        `of` maps a parameter to what is viewed: `lambda p: p.grad` for gradients. A tied head has no entry.
        """
        views = {"model.embed_tokens.weight": of(self.embedding.weight)}
        for i, layer in enumerate(self.layers):
            named = {f"self_attn.{name}": view for name, view in attention_weights(layer.attention, of).items()}
            named |= {f"mlp.{name}": view for name, view in mlp_weights(layer.mlp, of).items()}
            named |= {"input_layernorm": of(layer.norm1.weight), "post_attention_layernorm": of(layer.norm2.weight)}
            views |= {f"model.layers.{i}.{name}.weight": view for name, view in named.items()}
        views["model.norm.weight"] = of(self.norm.weight)
        if self.head.weight is not self.embedding.weight:
            views["lm_head.weight"] = of(self.head.weight)
        return views

    def hidden(self, tokens: Tensor) -> Tensor:
        """The input of the head: the normed residual stream (B, T, width)."""
        cos, sin = self.positions(tokens.shape[1])
        x = self.embedding(tokens)  # (B, T, width)
        x = x if self.residual is None else x.to(self.residual)
        mask = causal_mask(tokens.shape[1], x) if self.masked else None
        for layer in self.layers:
            x = layer(x, cos, sin, mask) if self.checkpoint is None else self.checkpoint(layer, x, cos, sin, mask)
        return self.norm(x)

    def forward(self, tokens: Tensor) -> Tensor:
        """Logits (B, T, V)."""
        return self.head(self.hidden(tokens))


def preset(name: str) -> dict:
    """The arguments of a preset; a `ValueError` lists the valid names."""
    if name not in PRESETS:
        raise ValueError(f"unknown model {name!r}; valid: {', '.join(PRESETS)}")
    return PRESETS[name]


def attention_weights(attention: nn.Module, of: Callable[[Tensor], Tensor]) -> dict[str, Tensor]:
    """Views of what `of` makes of the weights of Llama's attention, whether its products are fused or not."""
    if attention.fused:
        q, k, v = of(attention.qkv.weight).split(attention.sizes)
    else:
        q, k, v = (of(linear.weight) for linear in (attention.q, attention.k, attention.v))
    return {"q_proj": q, "k_proj": k, "v_proj": v, "o_proj": of(attention.out.weight)}


def mlp_weights(mlp: nn.Module, of: Callable[[Tensor], Tensor]) -> dict[str, Tensor]:
    """The same of Llama's feed-forward layer, which may be one of `helpers.swiglu`."""
    if hasattr(mlp, "W"):  # `helpers.swiglu` stores them transposed
        gate, up, down = (of(weight).t() for weight in (mlp.W, mlp.V, mlp.U))
    elif mlp.fused:
        (gate, up), down = of(mlp.gate_up.weight).chunk(2), of(mlp.down.weight)
    else:
        gate, up, down = (of(linear.weight) for linear in (mlp.gate, mlp.up, mlp.down))
    return {"gate_proj": gate, "up_proj": up, "down_proj": down}
