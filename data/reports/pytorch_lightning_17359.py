"""Neural radiance-like field fitted to an analytic scene."""

import contextlib
import math
import time

import torch
from torch import nn

cfg = {
    "seed": 7,
    "debug": True,
    "fast_dev_run": False,
    "model": {"num_freqs": 8, "hidden": 96, "depth": 5, "lr": 5e-4},
    "data": {"rays": 96, "samples": 24},
    "trainer": {"max_steps": 4000, "log_every_n_steps": 50, "gradient_clip_val": 1.0},
}


class LightningModule(nn.Module):
    trainer = None

    def log(self, name, value, prog_bar=False):
        self.trainer.logged[name] = value


class RayDataModule:
    def __init__(self, rays, samples, seed):
        self.rays, self.samples = rays, samples
        self.generator = torch.Generator().manual_seed(seed)

    def train_dataloader(self):
        while True:
            origin = torch.randn(self.rays, 3, generator=self.generator)
            origin = 3 * origin / origin.norm(dim=-1, keepdim=True)
            target = 0.5 * torch.randn(self.rays, 3, generator=self.generator)
            direction = target - origin
            direction = direction / direction.norm(dim=-1, keepdim=True)
            closest = (origin - (origin * direction).sum(-1, keepdim=True) * direction).norm(dim=-1)
            colour = torch.stack([torch.exp(-closest), torch.sin(closest) ** 2, torch.cos(closest) ** 2], dim=-1)
            yield origin, direction, colour


class Field(LightningModule):
    def __init__(self, num_freqs, hidden, depth, lr):
        super().__init__()
        self.lr = lr
        self.register_buffer("freqs", 2.0 ** torch.arange(num_freqs) * math.pi / 4)
        width = 3 + 3 * 2 * num_freqs
        self.layers = nn.ModuleList()
        for i in range(depth):
            self.layers.append(nn.Linear(width if i == 0 else hidden, hidden))
        self.sigma = nn.Linear(hidden, 1)
        self.rgb = nn.Sequential(nn.Linear(hidden + 3, hidden // 2), nn.ReLU(), nn.Linear(hidden // 2, 3))

    def encode(self, x):
        angles = x.unsqueeze(-1) * self.freqs
        return torch.cat([x, angles.sin().flatten(-2), angles.cos().flatten(-2)], dim=-1)

    def forward(self, points, directions):
        h = self.encode(points)
        for layer in self.layers:
            h = torch.relu(layer(h))
        sigma = nn.functional.softplus(self.sigma(h)).squeeze(-1)
        rgb = torch.sigmoid(self.rgb(torch.cat([h, directions], dim=-1)))
        return sigma, rgb

    def render(self, origin, direction, samples):
        depth = torch.linspace(1.0, 5.0, samples)
        delta = depth[1] - depth[0]
        points = origin[:, None] + direction[:, None] * depth[None, :, None]
        sigma, rgb = self(points, direction[:, None].expand_as(points))
        transmittance = torch.ones(len(origin))
        colour = torch.zeros(len(origin), 3)
        for i in range(samples):
            alpha = 1 - torch.exp(-sigma[:, i] * delta)
            colour = colour + (transmittance * alpha)[:, None] * rgb[:, i]
            transmittance = transmittance * (1 - alpha)
        return colour

    def training_step(self, batch, batch_idx):
        origin, direction, target = batch
        colour = self.render(origin, direction, cfg["data"]["samples"])
        loss = nn.functional.mse_loss(colour, target)
        self.log("train_loss", loss.detach(), prog_bar=True)
        return loss

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=self.lr)


class Trainer:
    def __init__(self, max_steps, log_every_n_steps=50, gradient_clip_val=None, detect_anomaly=False):
        self.max_steps, self.log_every_n_steps = max_steps, log_every_n_steps
        self.gradient_clip_val, self.detect_anomaly = gradient_clip_val, detect_anomaly
        self.logged = {}

    def _context(self):
        return torch.autograd.set_detect_anomaly(True) if self.detect_anomaly else contextlib.nullcontext()

    def fit(self, model, datamodule):
        model.trainer = self
        optimizer = model.configure_optimizers()
        start = time.perf_counter()
        with self._context():
            for batch_idx, batch in enumerate(datamodule.train_dataloader()):
                if batch_idx >= self.max_steps:
                    break
                loss = model.training_step(batch, batch_idx)
                optimizer.zero_grad()
                loss.backward()
                if self.gradient_clip_val:
                    nn.utils.clip_grad_norm_(model.parameters(), self.gradient_clip_val)
                optimizer.step()
                if (batch_idx + 1) % self.log_every_n_steps == 0:
                    speed = (batch_idx + 1) / (time.perf_counter() - start)
                    print(f"step {batch_idx + 1}: train_loss={self.logged['train_loss'].item():.4f} ({speed:.1f} it/s)")


def main():
    torch.manual_seed(cfg["seed"])
    model = Field(**cfg["model"])
    datamodule = RayDataModule(cfg["data"]["rays"], cfg["data"]["samples"], cfg["seed"])
    trainer = Trainer(**cfg["trainer"], detect_anomaly=cfg["debug"])
    trainer.fit(model, datamodule)


if __name__ == "__main__":
    main()
