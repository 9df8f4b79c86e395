"""Fine-tune adapters: many hundreds of small tensors, and the optimizer of an old recipe."""

import sys

import torch
import torch.nn as nn


def argument(name, default):
    return sys.argv[sys.argv.index(name) + 1] if name in sys.argv else default


DEVICE, STEPS, FIXED = argument("--device", "cuda"), int(argument("--steps", 300)), "--fixed" in sys.argv


class Adapter(nn.Module):
    def __init__(self, width, rank):
        super().__init__()
        self.down, self.up = nn.Linear(width, rank), nn.Linear(rank, width)
        self.scale = nn.Parameter(torch.ones(width))

    def forward(self, x):
        return x + self.scale * self.up(self.down(x))


depth = 150 if DEVICE == "cuda" else 6
model = nn.Sequential(*(Adapter(256, 8) for _ in range(depth))).to(DEVICE)
kind = {"fused": True} if FIXED else {"foreach": False}
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, **kind)
x = torch.randn(2048 if DEVICE == "cuda" else 8, 256, device=DEVICE)
for step in range(STEPS):
    loss = model(x).square().mean()
    optimizer.zero_grad(set_to_none=True)
    loss.backward()
    optimizer.step()
