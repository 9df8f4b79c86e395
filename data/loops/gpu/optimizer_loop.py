# Vision transformer (small, 16 x 16 patches).
from argparse import ArgumentParser
from dataclasses import dataclass

import torch
import torch.nn as nn
import torch.nn.functional as F


@dataclass
class Config:
    width: int = 384
    heads: int = 6
    depth: int = 12
    side: int = 224
    batch: int = 32


class Block(nn.Module):
    def __init__(self, c: Config):
        super().__init__()
        self.heads = c.heads
        self.norm1, self.norm2 = nn.LayerNorm(c.width), nn.LayerNorm(c.width)
        self.qkv, self.out = nn.Linear(c.width, 3 * c.width), nn.Linear(c.width, c.width)
        self.up, self.down = nn.Linear(c.width, 4 * c.width), nn.Linear(4 * c.width, c.width)

    def forward(self, x):
        b, t, w = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(b, t, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        x = x + self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(b, t, w))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class ViT(nn.Module):
    def __init__(self, c: Config):
        super().__init__()
        self.patches = nn.Linear(3 * 16 * 16, c.width)
        self.places = nn.Parameter(0.02 * torch.randn((c.side // 16) ** 2, c.width))
        self.blocks = nn.Sequential(*(Block(c) for _ in range(c.depth)))
        self.norm, self.head = nn.LayerNorm(c.width), nn.Linear(c.width, 100)

    def forward(self, images):
        x = F.pixel_unshuffle(images, 16).flatten(2).transpose(1, 2)
        return self.head(self.norm(self.blocks(self.patches(x) + self.places)).mean(1))


class Trainer:
    def __init__(self, c: Config, fixed: bool):
        self.device = "cuda" if torch.cuda.is_available() else "cpu"
        self.model = ViT(c).to(self.device)
        how = {"fused": True} if fixed else {"foreach": False}
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=3e-4, weight_decay=0.05, **how)
        self.images = torch.randn(8, c.batch, 3, c.side, c.side, device=self.device)
        self.labels = torch.randint(100, (8, c.batch), device=self.device)

    def step(self, number: int):
        with torch.autocast(self.device, dtype=torch.bfloat16):
            loss = F.cross_entropy(self.model(self.images[number % 8]), self.labels[number % 8])
        self.optimizer.zero_grad(set_to_none=True)
        loss.backward()
        self.optimizer.step()
        return loss


if __name__ == "__main__":
    p = ArgumentParser()
    p.add_argument("--fixed", action="store_true")
    p.add_argument("--steps", type=int, default=1000)
    p.add_argument("--tiny", action="store_true")
    a = p.parse_args()
    torch.manual_seed(0)
    tiny = Config(width=16, heads=2, depth=2, side=32, batch=4)
    trainer = Trainer(tiny if a.tiny or not torch.cuda.is_available() else Config(), a.fixed)
    for i in range(a.steps):
        loss = trainer.step(i)
    print("loss", loss.item())
