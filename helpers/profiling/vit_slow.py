"""Slow twins of the ViT's parts, which compute the same, and the map between the two kinds of weights.

    slow = with_twins(ViT(), fixes=frozenset())           # same weights, same function, more kernels
    ViT().load_state_dict(plain_state(slow.state_dict()))

`plain_state` works on gradients by name, too: that is how the tests compare them.
"""

import math
from collections.abc import Mapping

import torch
from torch import Tensor, nn

from helpers.models.vit import ConvPatches, FusedMixing, FusedProjection, ViT


class ReshapedPatches(nn.Module):
    """Patches are copied together, (B, T, 3·P·P), and go through a linear layer."""

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
    """q, k and v by a product each: x is read three times, and each product is too small to fill the device."""

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
    """softmax(q·kᵀ/√D)·v step by step: each makes (B, H, T, T) numbers, and those of most are kept for backward."""

    def __init__(self, fused: FusedMixing) -> None:
        super().__init__()
        self.softmax = nn.Softmax(dim=-1)
        self.dropout = nn.Dropout(fused.dropout)

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        scores = torch.matmul(q, k.transpose(-1, -2)) * q.shape[-1] ** -0.5  # (B, H, T, T)
        return torch.matmul(self.dropout(self.softmax(scores)), v)


def with_twins(model: ViT, fixes: frozenset[str]) -> ViT:
    """The model, with a slow twin of each part that is not fixed. The twins take over the weights."""
    if "conv_patches" not in fixes:
        model.patches = ReshapedPatches(model.patches)
    for block in model.blocks:
        if "fused_qkv" not in fixes:
            block.attention.qkv = SeparateProjections(block.attention.qkv)
        if "fused_attention" not in fixes:
            block.attention.mix = MaterialisedMixing(block.attention.mix)
    return model


def plain_state(state: Mapping[str, Tensor], channels: int = 3) -> dict[str, Tensor]:
    """Weights, or gradients, of any mixture of twins under the names and in the shapes that `ViT` has."""
    plain: dict[str, Tensor] = {}
    for name, tensor in state.items():
        if name.endswith("qkv.q.weight"):
            stem = name.removesuffix("q.weight")
            plain[stem + "linear.weight"] = torch.cat([state[f"{stem}{part}.weight"] for part in "qkv"])
        elif name == "patches.linear.weight":
            size = math.isqrt(tensor.shape[1] // channels)
            plain["patches.conv.weight"] = tensor.unflatten(1, (channels, size, size))
        elif name == "patches.linear.bias":
            plain["patches.conv.bias"] = tensor
        elif not name.endswith(("qkv.k.weight", "qkv.v.weight")):
            plain[name] = tensor
    return plain
