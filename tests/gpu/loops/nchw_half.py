"""A residual network under autocast, images as torch lays them out by default."""

import argparse

import torch
import torch.nn.functional as F
from torch import nn


class Residual(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.a, self.b = (nn.Conv2d(width, width, 3, padding=1, bias=False) for _ in range(2))
        self.n, self.m = nn.BatchNorm2d(width), nn.BatchNorm2d(width)

    def forward(self, x):
        return F.relu(x + self.m(self.b(F.relu(self.n(self.a(x))))))


def parse():
    cli = argparse.ArgumentParser(description=__doc__)
    cli.add_argument("--fixed", action="store_true")
    cli.add_argument("--steps", type=int, default=150)
    cli.add_argument("--device", default="cuda")
    return cli.parse_args()


def main(args):
    big = args.device == "cuda"
    width, side, batch = (256, 56, 64) if big else (8, 8, 2)
    model = nn.Sequential(nn.Conv2d(3, width, 1), *(Residual(width) for _ in range(6 if big else 1)))
    model = model.to(args.device, memory_format=torch.channels_last if args.fixed else torch.contiguous_format)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9, fused=True)
    images = torch.randn(batch, 3, side, side, device=args.device)
    if args.fixed:
        images = images.contiguous(memory_format=torch.channels_last)
    for _ in range(args.steps):
        with torch.autocast(args.device, torch.bfloat16):
            loss = model(images).float().square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


main(parse())
