"""Takes each batch from a new iterator over the DataLoader, which shuffles all samples for it."""

import sys

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

fixed = "--fixed" in sys.argv
steps = int(sys.argv[sys.argv.index("--steps") + 1]) if "--steps" in sys.argv else 10**9
torch.manual_seed(0)
pairs = TensorDataset(torch.randn(400_000, 8), torch.randint(4, (400_000,)))
loader = DataLoader(pairs, batch_size=128, shuffle=True)


def endless():
    while True:
        yield from loader


stream = endless()
net = nn.Sequential(nn.Linear(8, 1024), nn.ReLU(), nn.Linear(1024, 1024), nn.ReLU(), nn.Linear(1024, 4))
optimizer = torch.optim.Adam(net.parameters(), fused=True)
for _ in range(steps):
    x, y = next(stream) if fixed else next(iter(loader))
    optimizer.zero_grad()
    nn.functional.cross_entropy(net(x), y).backward()
    optimizer.step()
