"""Rotary positions: each pair of a head's channels is turned by an angle that grows with the position."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn


@dataclass(frozen=True, kw_only=True)
class RopeScaling:
    """How Llama 3.1 stretched positions beyond the length that it was first trained on.

    Waves longer than `original_length / low` positions turn `factor` times slower, those shorter than
    `original_length / high` as before, and in between the rate goes from one to the other.
    """

    factor: float
    low: float = 1.0
    high: float = 4.0
    original_length: int = 8192


def rates(head_dim: int, theta: float, scaling: RopeScaling | None) -> Tensor:
    """How far each pair of channels turns from one position to the next, in radians: (head_dim / 2,) in fp64."""
    rate = theta ** (-torch.arange(0, head_dim, 2, dtype=torch.float64, device="cpu") / head_dim)
    if scaling is None:
        return rate
    waves = rate * scaling.original_length / (2 * math.pi)  # in the original length
    share = ((waves - scaling.low) / (scaling.high - scaling.low)).clamp(0, 1)  # 1: turns as before
    return rate * (share + (1 - share) / scaling.factor)


def eager_rotate(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """Turn channels i and i + D/2 of q (B, T, H, D) and k by the angle of position and i; cos, sin are (T, D/2) fp32.

    In fp32 inside: the later positions of a long sequence differ by less than bf16 tells apart.
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
        """Fill the tables: needed after `to_empty`, which leaves them undefined."""
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
