"""Anomaly detection that was left on."""

import sys

import torch
from torch import nn

torch.autograd.set_detect_anomaly("--fixed" not in sys.argv)
steps = int(sys.argv[sys.argv.index("--steps") + 1]) if "--steps" in sys.argv else 10**9
generator = nn.Sequential(*[nn.Sequential(nn.Linear(64, 64), nn.BatchNorm1d(64), nn.LeakyReLU(0.2)) for _ in range(20)])
optimizer = torch.optim.Adam(generator.parameters(), 2e-4, betas=(0.5, 0.999), fused=True)
for _ in range(steps):
    optimizer.zero_grad()
    fake = generator(torch.randn(32, 64))
    fake.tanh().square().mean().backward()
    optimizer.step()
