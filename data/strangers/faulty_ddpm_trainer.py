"""Denoising diffusion over latent codes (e.g. from a frozen autoencoder)."""
import copy
import math
from pathlib import Path
from tempfile import mkdtemp

import torch
from torch import nn
import torch.nn.functional as F


def cycle(data, batch_size, generator):
    while True:
        for idx in torch.randperm(len(data), generator=generator).split(batch_size):
            if len(idx) == batch_size:
                yield data[idx]


def cosine_alphas(steps, s=0.008):
    x = torch.linspace(0, steps, steps + 1, dtype=torch.float64)
    bar = torch.cos((x / steps + s) / (1 + s) * math.pi / 2) ** 2
    return (bar / bar[0]).clamp(1e-5, 1 - 1e-5)[1:].float()


class TimeEmbedding(nn.Module):
    def __init__(self, dim):
        super().__init__()
        half = dim // 2
        self.register_buffer("freqs", torch.exp(-math.log(10000) * torch.arange(half) / (half - 1)))
        self.mlp = nn.Sequential(nn.Linear(dim, dim), nn.SiLU(), nn.Linear(dim, dim))

    def forward(self, t):
        ang = t[:, None].float() * self.freqs
        return self.mlp(torch.cat([ang.sin(), ang.cos()], -1))


class Block(nn.Module):
    def __init__(self, dim, t_dim):
        super().__init__()
        self.norm = nn.LayerNorm(dim)
        self.film = nn.Linear(t_dim, 2 * dim)
        self.net = nn.Sequential(nn.Linear(dim, dim), nn.SiLU(), nn.Linear(dim, dim))

    def forward(self, x, t):
        scale, shift = self.film(t).chunk(2, -1)
        return x + self.net(self.norm(x) * (1 + scale) + shift)


class Denoiser(nn.Module):
    def __init__(self, latent, dim=1024, depth=6, t_dim=128):
        super().__init__()
        self.time = TimeEmbedding(t_dim)
        self.inp = nn.Linear(latent, dim)
        self.blocks = nn.ModuleList([Block(dim, t_dim) for _ in range(depth)])
        self.out = nn.Linear(dim, latent)

    def forward(self, x, t):
        t = self.time(t)
        x = self.inp(x)
        for block in self.blocks:
            x = block(x, t)
        return self.out(x)


class GaussianDiffusion(nn.Module):
    def __init__(self, model, latent, timesteps=400):
        super().__init__()
        self.model, self.latent, self.timesteps = model, latent, timesteps
        bar = cosine_alphas(timesteps)
        self.register_buffer("sqrt_bar", bar.sqrt())
        self.register_buffer("sqrt_one_minus_bar", (1 - bar).sqrt())

    def forward(self, x0):
        t = torch.randint(0, self.timesteps, (len(x0),))
        noise = torch.randn_like(x0)
        xt = self.sqrt_bar[t, None] * x0 + self.sqrt_one_minus_bar[t, None] * noise
        return F.mse_loss(self.model(xt, t), noise)


class Trainer:
    def __init__(self, diffusion, data, *, batch_size=16, lr=2e-4, num_steps=8000, ema_decay=0.995,
                 ema_start=5, log_every=50, save_every=4000, folder=None):
        self.diffusion = diffusion
        self.ema_model = copy.deepcopy(diffusion)
        self.ema_decay, self.ema_start = ema_decay, ema_start
        self.data = cycle(data, batch_size, torch.Generator().manual_seed(0))
        self.optim = torch.optim.AdamW(diffusion.parameters(), lr=lr, betas=(0.9, 0.99), fused=True)
        self.num_steps, self.log_every, self.save_every = num_steps, log_every, save_every
        self.folder = Path(folder or mkdtemp(prefix="ddpm_"))
        self.step = 0

    def save(self):
        torch.save({"step": self.step, "ema": self.ema_model.state_dict()}, self.folder / "latest.pt")

    def update_ema(self):
        current = self.diffusion.state_dict()
        if self.step < self.ema_start:
            self.ema_model.load_state_dict(current)
            return
        averaged = copy.deepcopy(self.ema_model.state_dict())
        for key, value in copy.deepcopy(current).items():
            averaged[key] = averaged[key] * self.ema_decay + value * (1 - self.ema_decay)
        self.ema_model.load_state_dict(averaged)

    def train(self):
        smooth = None
        while self.step < self.num_steps:
            loss = self.diffusion(next(self.data))
            self.optim.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(self.diffusion.parameters(), 1.0, foreach=True)
            self.optim.step()
            self.step += 1
            self.update_ema()

            value = loss.item()
            smooth = value if smooth is None else 0.98 * smooth + 0.02 * value
            if self.step % self.log_every == 0:
                print(f"step {self.step}/{self.num_steps}  loss {smooth:.4f}", flush=True)
            if self.step % self.save_every == 0:
                self.save()


def latent_codes(n, dim, clusters=16):
    g = torch.Generator().manual_seed(4)
    centers = torch.randn(clusters, dim, generator=g)
    codes = centers[torch.randint(0, clusters, (n,), generator=g)] + 0.3 * torch.randn(n, dim, generator=g)
    return (codes - codes.mean(0)) / codes.std(0)


if __name__ == "__main__":
    torch.manual_seed(0)
    latent = 128
    diffusion = GaussianDiffusion(Denoiser(latent), latent)
    Trainer(diffusion, latent_codes(8192, latent)).train()
