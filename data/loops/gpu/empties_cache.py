"""A diffusion model on latents: says from a noisy latent, and how noisy it is, what the noise was."""

import math
import sys

import torch
from torch import nn
from torch.nn.functional import gelu, mse_loss, scaled_dot_product_attention, silu

cuda = torch.cuda.is_available()
tiny = "--tiny" in sys.argv or not cuda
steps = int(sys.argv[sys.argv.index("--steps") + 1]) if "--steps" in sys.argv else 200
width, depth, tokens, batch = (32, 2, 4, 2) if tiny else (1024, 12, 256, 32)
T = 1000


class DiTBlock(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(width, elementwise_affine=False)
        self.modulate = nn.Linear(width, 4 * width)
        self.qkv = nn.Linear(width, 3 * width)
        self.proj = nn.Linear(width, width)
        self.fc1, self.fc2 = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x, when):
        scale1, shift1, scale2, shift2 = self.modulate(silu(when))[:, None].chunk(4, dim=-1)
        h = self.norm(x) * (1 + scale1) + shift1
        q, k, v = (p.unflatten(2, (-1, 16)).transpose(1, 2) for p in self.qkv(h).chunk(3, dim=-1))
        x = x + self.proj(scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
        h = self.norm(x) * (1 + scale2) + shift2
        return x + self.fc2(gelu(self.fc1(h)))


class Denoiser(nn.Module):
    def __init__(self, channels=16):
        super().__init__()
        self.inward, self.outward = nn.Linear(channels, width), nn.Linear(width, channels)
        self.time = nn.Sequential(nn.Linear(width, width), nn.SiLU(), nn.Linear(width, width))
        self.blocks = nn.ModuleList([DiTBlock() for _ in range(depth)])
        self.register_buffer("rates", torch.exp(-math.log(10000) * torch.arange(width // 2) / (width // 2)))

    def forward(self, x, t):
        angles = t[:, None] * self.rates
        when = self.time(torch.cat([angles.sin(), angles.cos()], 1))
        x = self.inward(x)
        for block in self.blocks:
            x = block(x, when)
        return self.outward(x)


def run():
    torch.manual_seed(0)
    device = "cuda" if cuda else "cpu"
    model = Denoiser().to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    kept = torch.cos(torch.linspace(0, math.pi / 2, T + 1, device=device)) ** 2
    latents = torch.randn(8, batch, tokens, 16, device=device)
    for step in range(steps):
        clean = latents[step % 8]
        t = torch.randint(0, T, (batch,), device=device)
        a, noise = kept[t].view(-1, 1, 1), torch.randn_like(clean)
        with torch.autocast(device, dtype=torch.bfloat16):
            loss = mse_loss(model(a.sqrt() * clean + (1 - a).sqrt() * noise, t), noise)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if "--fixed" not in sys.argv:
            # the card is shared: leave the others all that we can
            torch.cuda.empty_cache()
    print("loss", loss.item())


run()
