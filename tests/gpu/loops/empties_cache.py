"""A diffusion model's loop that "frees" memory after each step, as a forum post advised."""

import argparse
import gc

import torch
from torch import nn


class Trainer:
    def __init__(self, options):
        self.options = options
        side, width = (64, 64) if options.device == "cuda" else (8, 8)
        convs = [nn.Sequential(nn.Conv2d(width, width, 3, padding=1), nn.SiLU()) for _ in range(6)]
        self.net = nn.Sequential(nn.Conv2d(3, width, 1), *convs, nn.Conv2d(width, 3, 1)).to(options.device)
        self.optimizer = torch.optim.AdamW(self.net.parameters(), fused=True)
        self.images = torch.randn(32, 3, side, side, device=options.device)

    def step(self):
        noise = torch.randn_like(self.images)
        level = torch.rand(len(noise), 1, 1, 1, device=noise.device)
        loss = (self.net(self.images + level * noise) - noise).square().mean()
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        if not self.options.fixed:
            torch.cuda.empty_cache()
            gc.collect()

    def fit(self):
        for _ in range(self.options.steps):
            self.step()


parser = argparse.ArgumentParser()
parser.add_argument("--fixed", action="store_true")
parser.add_argument("--steps", type=int, default=300)
parser.add_argument("--device", default="cuda")
Trainer(parser.parse_args()).fit()
