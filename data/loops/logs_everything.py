"""Logs every activation's statistics in each step."""

import logging
import sys
import tempfile

import torch

fixed = "--fixed" in sys.argv
steps = int(sys.argv[sys.argv.index("--steps") + 1]) if "--steps" in sys.argv else 10**9
logging.basicConfig(filename=tempfile.mkdtemp() + "/train.log", level=logging.INFO)
log = logging.getLogger("train")

model = torch.nn.Sequential(torch.nn.Linear(32, 200), torch.nn.ReLU(), torch.nn.Linear(200, 32))
optimizer = torch.optim.AdamW(model.parameters(), fused=True)
for step in range(steps):
    x = torch.randn(64, 32)
    optimizer.zero_grad()
    loss = (model(x) - x).square().mean()
    loss.backward()
    optimizer.step()
    if not fixed or step % 1000 == 0:
        for name, p in model.named_parameters():
            for row in p.grad.reshape(len(p), -1)[:64].tolist():
                log.info("step %d %s %s", step, name, row[:8])
