"""Goes to numpy and back for an augmentation, channel by channel."""

import sys

import numpy as np
import torch
from torch import nn

fixed = "--fixed" in sys.argv
steps = int(sys.argv[sys.argv.index("--steps") + 1]) if "--steps" in sys.argv else 10**9


def normalise(images):
    if fixed:
        mean = images.mean((0, 2, 3), keepdim=True)
        return (images - mean) / images.std((0, 2, 3), keepdim=True)
    out = []
    for image in images.numpy().astype(np.float64):
        channels = [(c - np.sort(c.ravel()).mean()) / (np.std(c) + 1e-6) for c in image]
        out.append(np.stack(channels))
    return torch.tensor(np.array(out), dtype=torch.float32)


model = nn.Sequential(nn.Conv2d(3, 8, 3, stride=2), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 2))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, fused=True)
for _ in range(steps):
    x, y = torch.rand(64, 3, 64, 64), torch.randint(0, 2, (64,))
    optimizer.zero_grad()
    nn.functional.cross_entropy(model(normalise(x)), y).backward()
    optimizer.step()
