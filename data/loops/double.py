"""Inputs from numpy are float64, and the model was made to fit them."""

import sys

import numpy as np
import torch

fixed = "--fixed" in sys.argv
steps = int(sys.argv[sys.argv.index("--steps") + 1]) if "--steps" in sys.argv else 10**9
rng = np.random.default_rng(0)
data, labels = rng.normal(size=(8192, 256)), rng.integers(0, 10, size=8192)
model = torch.nn.Sequential(torch.nn.Linear(256, 1024), torch.nn.ReLU(), torch.nn.Linear(1024, 10))
if not fixed:
    model = model.double()
opt = torch.optim.SGD(model.parameters(), lr=0.01, fused=True)
for step in range(steps):
    pick = slice(step % 32 * 256, step % 32 * 256 + 256)
    x, y = torch.from_numpy(data[pick]), torch.from_numpy(labels[pick])
    if fixed:
        x = x.float()
    opt.zero_grad()
    torch.nn.functional.cross_entropy(model(x), y).backward()
    opt.step()
