"""Accumulates gradients over micro-batches of one sample where a batch would fit."""

import argparse

import torch
from torch import nn

ap = argparse.ArgumentParser()
ap.add_argument("--fixed", action="store_true")
ap.add_argument("--steps", type=int, default=10**9)
args = ap.parse_args()
BATCH, MICRO = 32, 32 if args.fixed else 1
net = nn.Sequential(nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 10))
optimizer = torch.optim.SGD(net.parameters(), lr=0.01, fused=True)
for step in range(args.steps):
    x, y = torch.randn(BATCH, 512), torch.randint(0, 10, (BATCH,))
    optimizer.zero_grad()
    for inputs, labels in zip(x.split(MICRO), y.split(MICRO)):
        loss = nn.functional.cross_entropy(net(inputs), labels) * len(inputs) / BATCH
        loss.backward()
    optimizer.step()
