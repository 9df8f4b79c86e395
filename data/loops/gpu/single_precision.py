"""A GAN of plain layers for 32 × 32 images."""

import argparse

import torch
import torch.nn.functional as F
from torch import nn


def parsed():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--fixed", action="store_true", help="TF32")
    parser.add_argument("--steps", type=int, default=250)
    parser.add_argument("--tiny", action="store_true")
    return parser.parse_args()


def mlp(*widths):
    layers = []
    for i in range(len(widths) - 1):
        layers += [nn.Linear(widths[i], widths[i + 1]), nn.LeakyReLU(0.2, inplace=True)]
    return nn.Sequential(*layers[:-1])


def main(args):
    torch.set_float32_matmul_precision("high" if args.fixed else "highest")
    torch.manual_seed(0)
    dev = "cuda" if torch.cuda.is_available() else "cpu"
    noise, width, pixels, batch = (8, 16, 12, 4) if args.tiny or dev == "cpu" else (512, 4096, 3072, 4096)
    generator, critic = mlp(noise, width, width, pixels).to(dev), mlp(pixels, width, width, 1).to(dev)
    opt_g = torch.optim.Adam(generator.parameters(), lr=1e-4, betas=(0.5, 0.99), fused=True)
    opt_d = torch.optim.Adam(critic.parameters(), lr=1e-4, betas=(0.5, 0.99), fused=True)
    images = torch.rand(8 * batch, pixels, device=dev)

    for step in range(args.steps):
        start = step % 8 * batch
        real, z = images[start : start + batch], torch.randn(batch, noise, device=dev)

        critic.requires_grad_(True)
        with torch.no_grad():
            fake = generator(z)
        loss_d = F.softplus(-critic(real)).mean() + F.softplus(critic(fake)).mean()
        opt_d.zero_grad()
        loss_d.backward()
        opt_d.step()

        critic.requires_grad_(False)
        loss_g = F.softplus(-critic(generator(z))).mean()
        opt_g.zero_grad()
        loss_g.backward()
        opt_g.step()
    print("loss", loss_g.item())


if __name__ == "__main__":
    main(parsed())
