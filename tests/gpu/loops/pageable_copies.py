"""Denoise large volumes: every batch comes from the host's memory."""

import sys

import torch
from torch import nn

fixed = "--fixed" in sys.argv
steps = int(sys.argv[sys.argv.index("--steps") + 1]) if "--steps" in sys.argv else 300
device = sys.argv[sys.argv.index("--device") + 1] if "--device" in sys.argv else "cuda"
size = 96 if device == "cuda" else 16


class Denoiser(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Sequential(nn.Conv3d(1, 8, 3, padding=1), nn.ReLU(), nn.Conv3d(8, 1, 3, padding=1))

    def forward(self, volume):
        return volume - self.inner(volume)


def batches():
    volumes = torch.randn(4, 16, 1, size, size, size)
    if fixed:
        volumes = volumes.pin_memory() if device == "cuda" else volumes
    for step in range(steps):
        yield volumes[step % 4]


def main():
    model = Denoiser().to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, fused=True)
    ahead = None
    for batch in batches():
        clean = batch.to(device, non_blocking=fixed)
        clean, ahead = (clean if ahead is None else ahead), clean
        loss = (model(clean + 0.1 * torch.randn_like(clean)) - clean).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()


main()
