"""A small GPT whose attention is written as in the paper."""

import math
import sys

import torch
import torch.nn.functional as F
from torch import nn

rest = [a for a in sys.argv[1:] if a != "--fixed"]
opts = dict(zip(rest[::2], rest[1::2]))
FIXED, DEVICE, STEPS = "--fixed" in sys.argv, opts.get("--device", "cuda"), int(opts.get("--steps", 100))
T, C, HEADS, BLOCKS = (2048, 1024, 16, 6) if DEVICE == "cuda" else (32, 32, 2, 1)


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv, self.out = nn.Linear(C, 3 * C), nn.Linear(C, C)
        self.register_buffer("mask", torch.ones(T, T, dtype=torch.bool).tril())

    def forward(self, x):
        q, k, v = (t.unflatten(2, (HEADS, -1)).transpose(1, 2) for t in self.qkv(x).chunk(3, 2))
        if FIXED:
            y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        else:
            scores = (q @ k.transpose(2, 3)) / math.sqrt(C // HEADS)
            y = scores.masked_fill(~self.mask, float("-inf")).softmax(3) @ v
        return x + self.out(y.transpose(1, 2).flatten(2))


torch.manual_seed(0)
gpt = nn.Sequential(nn.Embedding(512, C), *(Attention() for _ in range(BLOCKS)), nn.Linear(C, 512)).to(DEVICE)
optimizer = torch.optim.AdamW(gpt.parameters(), lr=1e-4, fused=True)
tokens = torch.randint(0, 512, (4, T), device=DEVICE)
for _ in range(STEPS):
    with torch.autocast(DEVICE, torch.bfloat16):
        loss = F.cross_entropy(gpt(tokens).flatten(0, 1), tokens.flatten())
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
