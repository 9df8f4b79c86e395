"""Hinge GAN on blobs-and-stripes images. Two optimizers, alternating updates."""
import time

import torch
from torch import nn, optim
import torch.nn.functional as F
from torch.nn.utils.parametrizations import spectral_norm

nz, ngf, ndf, nc, imsize = 64, 24, 24, 3, 32
batchSize, niter = 48, 30
lrG, lrD, beta1 = 1e-4, 4e-4, 0.0
manualSeed = 999
CL = torch.channels_last


def paint(n):
    g = torch.Generator().manual_seed(manualSeed)
    grid = torch.linspace(-1, 1, imsize)
    cx, cy = (torch.rand(2, n, 1, 1, generator=g) * 1.2 - 0.6)
    radius = 0.2 + 0.4 * torch.rand(n, 1, 1, generator=g)
    blob = torch.sigmoid(((radius ** 2) - (grid[None, :, None] - cy) ** 2 - (grid[None, None] - cx) ** 2) * 25)
    stripes = 0.5 + 0.5 * torch.sin(grid[None, :, None] * (4 + 12 * torch.rand(n, 1, 1, generator=g)))
    fg, bg = torch.rand(2, n, 3, 1, 1, generator=g)
    return (2 * (blob[:, None] * fg + (1 - blob[:, None]) * bg * stripes[:, None]) - 1).contiguous(memory_format=CL)


class Generator(nn.Module):
    def __init__(self):
        super().__init__()
        self.project = nn.Linear(nz, ngf * 4 * 16)
        def up(i, o):
            return [nn.Upsample(scale_factor=2), nn.Conv2d(i, o, 3, 1, 1, bias=False), nn.BatchNorm2d(o), nn.ReLU(True)]
        self.main = nn.Sequential(*up(ngf * 4, ngf * 4), *up(ngf * 4, ngf * 2), *up(ngf * 2, ngf),
                                  nn.Conv2d(ngf, nc, 3, 1, 1), nn.Tanh())

    def forward(self, z):
        x = self.project(z).view(-1, ngf * 4, 4, 4).contiguous(memory_format=CL)
        return self.main(x)


class Discriminator(nn.Module):
    def __init__(self):
        super().__init__()
        def down(i, o):
            return [spectral_norm(nn.Conv2d(i, o, 4, 2, 1)), nn.LeakyReLU(0.2, inplace=True)]
        self.main = nn.Sequential(*down(nc, ndf), *down(ndf, ndf * 2), *down(ndf * 2, ndf * 4), nn.Flatten(),
                                  spectral_norm(nn.Linear(ndf * 4 * 16, 1)))

    def forward(self, x):
        return self.main(x).squeeze(1)


torch.manual_seed(manualSeed)
netG, netD = Generator().to(memory_format=CL), Discriminator().to(memory_format=CL)
optimizerD = optim.Adam(netD.parameters(), lr=lrD, betas=(beta1, 0.9), fused=True)
optimizerG = optim.Adam(netG.parameters(), lr=lrG, betas=(beta1, 0.9), fused=True)
images = paint(6000)
netG.train()
netD.train()

for epoch in range(niter):
    start = time.time()
    order = torch.randperm(len(images)).split(batchSize)
    for i, idx in enumerate(order):
        real = images[idx]
        fake = netG(torch.randn(len(idx), nz))

        ############################
        # (1) discriminator
        ############################
        netD.requires_grad_(True)
        scores = netD(torch.cat([real, fake.detach()]))
        real_score, fake_score = scores.chunk(2)
        errD = F.relu(1 - real_score).mean() + F.relu(1 + fake_score).mean()
        optimizerD.zero_grad(set_to_none=True)
        errD.backward()
        optimizerD.step()

        ############################
        # (2) generator
        ############################
        netD.requires_grad_(False)
        errG = -netD(fake).mean()
        optimizerG.zero_grad(set_to_none=True)
        errG.backward()
        optimizerG.step()

        if i % 25 == 0:
            print(f"[{epoch}/{niter}][{i}/{len(order)}] Loss_D: {errD.item():.4f} Loss_G: {errG.item():.4f} "
                  f"D(x): {real_score.mean().item():.3f} D(G(z)): {fake_score.mean().item():.3f}", flush=True)
    print(f"epoch {epoch} took {time.time() - start:.1f}s", flush=True)
