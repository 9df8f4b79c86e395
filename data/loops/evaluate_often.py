"""Validates after every second step."""

import sys

import torch
from torch import nn


def accuracy(model, batches):
    model.eval()
    right = 0
    with torch.no_grad():
        for x, y in batches:
            right += (model(x).argmax(1) == y).sum()
    model.train()
    return right / sum(len(y) for _, y in batches)


def train(model, optimizer, every, steps):
    held_out = [(torch.randn(128, 3, 16, 16), torch.randint(0, 10, (128,))) for _ in range(8)]
    for step in range(1, steps + 1):
        x, y = torch.randn(128, 3, 16, 16), torch.randint(0, 10, (128,))
        loss = nn.functional.cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % every == 0:
            accuracy(model, held_out)


net = nn.Sequential(nn.Conv2d(3, 32, 3), nn.ReLU(), nn.Conv2d(32, 32, 3), nn.ReLU(), nn.Flatten(), nn.LazyLinear(10))
net(torch.zeros(1, 3, 16, 16))
train(
    net,
    torch.optim.SGD(net.parameters(), 0.01, fused=True),
    every=200 if "--fixed" in sys.argv else 2,
    steps=int(sys.argv[sys.argv.index("--steps") + 1]) if "--steps" in sys.argv else 10**9,
)
