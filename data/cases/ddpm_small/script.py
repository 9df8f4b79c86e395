import sys

import torch
from torch import nn
from torch.nn import functional as F

T, STEPS, EMA = 200, int(sys.argv[1]), 0.995
torch.manual_seed(0)


def make_pictures(count):
    """Gaussian blobs of 16 by 16 pixels."""
    grid = torch.arange(16.0)
    centres, widths = torch.rand(count, 2) * 10 + 3, torch.rand(count) * 2 + 1
    rows = (grid[None] - centres[:, :1]) ** 2
    columns = (grid[None] - centres[:, 1:]) ** 2
    return torch.exp(-(rows[:, :, None] + columns[:, None]) / (2 * widths[:, None, None] ** 2))[:, None] * 2 - 1


def alpha_bar(t):
    """The product of 1 - beta up to a step."""
    product = torch.ones(())
    for beta in torch.linspace(1e-4, 0.04, T)[: t + 1]:
        product = product * (1 - beta)
    return product


class TimeEmbedding(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.dim = dim
        self.mlp = nn.Sequential(nn.Linear(dim, dim * 2), nn.SiLU(), nn.Linear(dim * 2, dim))

    def forward(self, t):
        out = torch.zeros(len(t), self.dim)
        for i in range(self.dim // 2):
            frequency = 10000.0 ** (-2 * i / self.dim)
            for row in range(len(t)):
                out[row, 2 * i] = torch.sin(t[row] * frequency)
                out[row, 2 * i + 1] = torch.cos(t[row] * frequency)
        return self.mlp(out)


class ResBlock(nn.Module):
    def __init__(self, cin, cout, dim):
        super().__init__()
        self.norm, self.conv = nn.GroupNorm(4, cin), nn.Conv2d(cin, cout, 3, padding=1)
        self.time, self.skip = nn.Linear(dim, cout), nn.Conv2d(cin, cout, 1)

    def forward(self, x, temb):
        h = self.conv(F.silu(self.norm(x))) + self.time(temb)[:, :, None, None]
        return h + self.skip(x)


class UNet(nn.Module):
    def __init__(self, width=16, dim=32):
        super().__init__()
        self.time = TimeEmbedding(dim)
        self.stem = nn.Conv2d(1, width, 3, padding=1)
        self.down, self.middle = ResBlock(width, width * 2, dim), ResBlock(width * 2, width * 2, dim)
        self.up, self.head = ResBlock(width * 3, width, dim), nn.Conv2d(width, 1, 3, padding=1)

    def forward(self, x, t):
        temb = self.time(t)
        first = self.stem(x)
        h = self.middle(self.down(F.avg_pool2d(first, 2), temb), temb)
        h = F.interpolate(h, scale_factor=2)
        return self.head(self.up(torch.cat([h, first], 1), temb))


pictures = make_pictures(512)
model = UNet()
shadow = {name: p.detach().clone() for name, p in model.named_parameters()}
optimizer = torch.optim.Adam(model.parameters(), lr=2e-4)


def q_sample(x, t, noise):
    out = []
    for row in range(len(x)):
        a = alpha_bar(int(t[row].item()))
        out.append(a.sqrt() * x[row] + (1 - a).sqrt() * noise[row])
    return torch.stack(out)


for step in range(STEPS):
    batch = pictures[torch.randint(0, len(pictures), (16,))]
    t = torch.randint(0, T, (16,))
    noise = torch.randn_like(batch)
    loss = F.mse_loss(model(q_sample(batch, t, noise), t.float()), noise)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    for name, p in model.named_parameters():
        shadow[name] = EMA * shadow[name] + (1 - EMA) * p.detach()
    if step % 10 == 0:
        print(f"step {step}: loss {loss.item():.4f}")
