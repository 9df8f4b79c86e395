"""Adam written out, parameter by parameter."""

import sys

import torch
from torch import nn

fixed = "--fixed" in sys.argv
steps = int(sys.argv[sys.argv.index("--steps") + 1]) if "--steps" in sys.argv else 10**9


class OwnAdam:
    def __init__(self, params, lr=1e-3):
        self.params = list(params)
        self.m = [torch.zeros_like(p) for p in self.params]
        self.v = [torch.zeros_like(p) for p in self.params]
        self.lr, self.t = lr, 0

    @torch.no_grad()
    def step(self):
        self.t += 1
        for p, m, v in zip(self.params, self.m, self.v):
            m.mul_(0.9).add_(p.grad, alpha=0.1)
            v.mul_(0.999).addcmul_(p.grad, p.grad, value=0.001)
            m_hat, v_hat = m / (1 - 0.9**self.t), v / (1 - 0.999**self.t)
            p.sub_(self.lr * m_hat / (v_hat.sqrt() + 1e-8))

    def zero_grad(self):
        for p in self.params:
            p.grad = None


layers = [nn.Sequential(nn.LayerNorm(64), nn.Linear(64, 64), nn.GELU()) for _ in range(60)]
model = nn.Sequential(*layers)
optimizer = torch.optim.Adam(model.parameters(), fused=True) if fixed else OwnAdam(model.parameters())
for _ in range(steps):
    optimizer.zero_grad()
    model(torch.randn(8, 64)).square().mean().backward()
    optimizer.step()
