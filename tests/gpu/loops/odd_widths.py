"""A language model's head of 50257 words on states of width 1023, in bf16."""

import argparse

import torch
import torch.nn as nn
import torch.nn.functional as F

cli = argparse.ArgumentParser()
cli.add_argument("--fixed", action="store_true", help="widths that are multiples of 64")
cli.add_argument("--steps", type=int, default=150)
cli.add_argument("--device", default="cuda")
args = cli.parse_args()
words, width = (50257, 1023) if args.device == "cuda" else (257, 31)
if args.fixed:
    words, width = -(-words // 64) * 64, -(-width // 64) * 64

model = nn.Sequential(nn.Linear(width, width), nn.GELU(), nn.Linear(width, words)).to(args.device, torch.bfloat16)
optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, fused=True)
states = torch.randn(4096 if args.device == "cuda" else 8, width, device=args.device, dtype=torch.bfloat16)
targets = torch.randint(0, 257, (len(states),), device=args.device)
for _ in range(args.steps):
    loss = F.cross_entropy(model(states), targets)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
