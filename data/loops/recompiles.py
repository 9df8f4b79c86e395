"""torch.compile with another shape in each step."""

import random
import sys

import torch
from torch import nn

fixed = "--fixed" in sys.argv
steps = int(sys.argv[sys.argv.index("--steps") + 1]) if "--steps" in sys.argv else 10**9
torch._dynamo.config.recompile_limit = 10**6

model = nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 64))
compiled = torch.compile(model, backend="aot_eager", dynamic=False)
optimizer = torch.optim.AdamW(model.parameters(), fused=True)
random.seed(0)
for step in range(steps):
    length = 512 if fixed else random.randint(1, 512)
    x = torch.randn(length, 64)
    optimizer.zero_grad()
    (compiled(x) - x).square().mean().backward()
    optimizer.step()
