"""AdamW over 400 small tensors, one after another."""

import sys

import torch

kind = {"fused": True} if "--fixed" in sys.argv else {"foreach": False}
limit = int(sys.argv[sys.argv.index("--steps") + 1]) if "--steps" in sys.argv else None


class Residual(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.lin = torch.nn.LayerNorm(48), torch.nn.Linear(48, 48)

    def forward(self, x):
        return x + self.lin(self.norm(x))


model = torch.nn.Sequential(*(Residual() for _ in range(100)))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, **kind)
step = 0
while limit is None or step < limit:
    optimizer.zero_grad()
    model(torch.randn(4, 48)).square().mean().backward()
    optimizer.step()
    step += 1
