"""Collects garbage after each step, out of fear for memory."""

import gc
import sys

import torch

fixed = "--fixed" in sys.argv
steps = int(sys.argv[sys.argv.index("--steps") + 1]) if "--steps" in sys.argv else 10**9
notes = [{"name": str(i), "tags": [i, i + 1]} for i in range(300_000)]
model = torch.nn.Linear(512, 512)
optimizer = torch.optim.SGD(model.parameters(), 0.01, fused=True)
for _ in range(steps):
    optimizer.zero_grad()
    model(torch.randn(128, 512)).abs().mean().backward()
    optimizer.step()
    if not fixed:
        gc.collect()
