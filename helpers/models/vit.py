"""A Vision Transformer for small images, built from replaceable parts.

Patches, projection and mixing are separate modules, so that a profile names them and chapter 3 can replace them by
slower variants.
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

INIT_STD = 0.02  # of the positions and the head


class ViT(nn.Module):
    """Images (B, 3, S, S) to logits (B, classes).

    Patch embeddings plus learned positions go through pre-norm blocks of attention and a GELU MLP; the mean of the
    normed tokens goes through a linear head. A class token instead of the mean would be one token more, and a copy of
    all of them to prepend it. The width need not be heads · head_dim.

    Forward costs 2·parameters·T FLOP an image, and 4·depth·heads·head_dim·T² for attention, which never forms the
    (T, T) weights. At the task's size (T = 49, 10 M parameters) that is 1.0 GFLOP, 3 % of it in attention.

    Linear weights are initialised Xavier-uniform, q, k and v separately, those that end a residual branch smaller by
    √(branches); patches normal with deviation 1/√(inputs); positions and head normal with 0.02; biases with 0.
    """

    def __init__(
        self,
        classes: int = 10,
        image_size: int = 224,
        patch_size: int = 32,
        width: int = 256,
        depth: int = 12,
        heads: int = 4,
        head_dim: int = 64,
        mlp_size: int = 1024,
        dropout: float = 0.1,
    ) -> None:
        super().__init__()
        if image_size % patch_size:
            raise ValueError(f"image_size is {image_size}; it must be a multiple of patch_size, {patch_size}")
        self.patches = ConvPatches(patch_size, width)
        self.positions = nn.Parameter(torch.empty((image_size // patch_size) ** 2, width))  # (T, C)
        self.dropout = nn.Dropout(dropout)
        self.blocks = nn.ModuleList(Block(width, heads, head_dim, mlp_size, dropout) for _ in range(depth))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, classes)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        patches = self.patches.conv
        nn.init.normal_(patches.weight, std=patches.weight[0].numel() ** -0.5)
        nn.init.zeros_(patches.bias)
        nn.init.normal_(self.positions, std=INIT_STD)
        ends = 1 / math.sqrt(2 * len(self.blocks))
        for block in self.blocks:
            for part in block.attention.qkv.linear.weight.chunk(3):
                nn.init.xavier_uniform_(part)
            for linear, gain in ((block.attention.out, ends), (block.mlp.up, 1.0), (block.mlp.down, ends)):
                nn.init.xavier_uniform_(linear.weight, gain)
                nn.init.zeros_(linear.bias)
        nn.init.normal_(self.head.weight, std=INIT_STD)
        nn.init.zeros_(self.head.bias)

    def forward(self, images: Tensor) -> Tensor:
        x = self.dropout(self.patches(images) + self.positions)  # (B, T, C)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x).mean(dim=1))  # (B, classes)


class ConvPatches(nn.Module):
    """Images (B, 3, S, S) to patch embeddings (B, T, C), row by row: a convolution whose stride is its size."""

    def __init__(self, patch_size: int, width: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, width, patch_size, stride=patch_size)

    def forward(self, images: Tensor) -> Tensor:
        return self.conv(images).flatten(2).transpose(1, 2)  # (B, C, s, s) -> (B, T, C)


class Block(nn.Module):
    """x + attention(norm(x)), then x + mlp(norm(x)), on (B, T, C)."""

    def __init__(self, width: int, heads: int, head_dim: int, mlp_size: int, dropout: float) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(width)
        self.attention = Attention(width, heads, head_dim, dropout)
        self.norm2 = nn.LayerNorm(width)
        self.mlp = MLP(width, mlp_size, dropout)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class Attention(nn.Module):
    """Attention of every token to all tokens of its image: (B, T, C) to (B, T, C)."""

    def __init__(self, width: int, heads: int, head_dim: int, dropout: float) -> None:
        super().__init__()
        self.qkv = FusedProjection(width, heads, head_dim)
        self.mix = FusedMixing(dropout)
        self.out = nn.Linear(heads * head_dim, width)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        mixed = self.mix(*self.qkv(x))  # (B, H, T, D)
        return self.dropout(self.out(mixed.transpose(1, 2).flatten(2)))


class FusedProjection(nn.Module):
    """x (B, T, C) to q, k and v, each (B, H, T, D), in one product that reads x once.

    It has no bias: the shift of the preceding norm acts as one.
    """

    def __init__(self, width: int, heads: int, head_dim: int) -> None:
        super().__init__()
        self.heads, self.head_dim = heads, head_dim
        self.linear = nn.Linear(width, 3 * heads * head_dim, bias=False)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        qkv = self.linear(x).unflatten(2, (3, self.heads, self.head_dim))  # (B, T, 3, H, D)
        q, k, v = qkv.permute(2, 0, 3, 1, 4).unbind(0)
        return q, k, v


class FusedMixing(nn.Module):
    """softmax(q·kᵀ/√D)·v in one kernel, with dropout of the weights; they are never stored."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.dropout = dropout

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, dropout_p=self.dropout if self.training else 0.0)


class MLP(nn.Module):
    """Linear, GELU, linear, for each token."""

    def __init__(self, width: int, mlp_size: int, dropout: float) -> None:
        super().__init__()
        self.up = nn.Linear(width, mlp_size)
        self.gelu = nn.GELU()
        self.dropout1 = nn.Dropout(dropout)
        self.down = nn.Linear(mlp_size, width)
        self.dropout2 = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        return self.dropout2(self.down(self.dropout1(self.gelu(self.up(x)))))
