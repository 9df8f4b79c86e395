"""DDP on two processes, of which the last one prepares its batch slowly."""

import os
import sys
import time

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

fixed = "--fixed" in sys.argv
steps = int(sys.argv[sys.argv.index("--steps") + 1]) if "--steps" in sys.argv else 10**9
dist.init_process_group("gloo")
rank, torch_threads = int(os.environ["RANK"]), torch.set_num_threads(1)


def prepare():
    if rank == 1 and not fixed:
        time.sleep(0.03)
    return torch.randn(64, 256)


model = DistributedDataParallel(
    torch.nn.Sequential(torch.nn.Linear(256, 256), torch.nn.ReLU(), torch.nn.Linear(256, 8))
)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, fused=True)
for _ in range(steps):
    x = prepare()
    optimizer.zero_grad()
    model(x).square().mean().backward()
    optimizer.step()
dist.destroy_process_group()
