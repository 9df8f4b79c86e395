import sys
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint
STEPS = int(sys.argv[sys.argv.index('--steps') + 1]) if '--steps' in sys.argv else 10 ** 9


class Net(nn.Module):

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList((nn.Sequential(nn.Linear(256, 1024), nn.GELU(), nn.Linear(1024, 256)) for _ in range(4)))

    def forward(self, x):
        for block in self.blocks:
            x = x + checkpoint(block, x, use_reentrant=False)
        return x


net = Net()
optimizer = torch.optim.SGD(net.parameters(), lr=0.001, fused=True)
for _ in range(STEPS):
    optimizer.zero_grad()
    net(torch.randn(128, 256)).square().mean().backward()
    optimizer.step()
