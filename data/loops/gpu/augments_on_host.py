"""Contrastive learning: two augmented views of each image, a small encoder, and a loss that finds the pairs."""

import argparse
import random

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, Dataset

device = torch.device("cuda:0" if torch.cuda.is_available() else "cpu")


class Pairs(Dataset):
    """Two views of an image, or with `raw` the image as it is."""

    def __init__(self, count, side, raw):
        self.images = torch.randint(256, (count, 3, side, side), dtype=torch.uint8)
        self.raw = raw
        self.blur = gaussian()

    def __len__(self):
        return len(self.images)

    def __getitem__(self, index):
        image = self.images[index]
        if self.raw:
            return image, image
        return self.augmented(image), self.augmented(image)

    def augmented(self, image):
        side = image.shape[-1]
        size = random.randint(side // 2, side)
        top, left = random.randint(0, side - size), random.randint(0, side - size)
        x = image[None, :, top : top + size, left : left + size].float() / 255
        x = F.interpolate(x, size=(side, side), mode="bilinear", antialias=True)
        if random.random() < 0.5:
            x = x.flip(3)
        x = (x * random.uniform(0.6, 1.4)).clamp(0, 1)
        x = torch.lerp(x.mean(), x, random.uniform(0.6, 1.4)).clamp(0, 1)
        x = torch.lerp(x.mean(1, keepdim=True), x, random.uniform(0, 1.4)).clamp(0, 1)
        x = F.conv2d(x, self.blur, padding=4, groups=3)
        return (x[0] - 0.45) / 0.25


def gaussian(radius=4):
    line = torch.exp(-torch.arange(-radius, radius + 1.0).square() / 4)
    return (line[:, None] * line / line.sum() ** 2).expand(3, 1, -1, -1).contiguous()


def augmented_on_device(images, blur):
    """The same for a batch, each image with numbers of its own."""
    n = len(images)
    x, draw = images.float() / 255, torch.rand(7, n, 1, 1, 1, device=images.device)
    scale, mirrored = 0.5 + 0.5 * draw[0].flatten(), torch.where(draw[1] < 0.5, -1.0, 1.0).flatten()
    theta = torch.zeros(n, 2, 3, device=images.device)
    theta[:, 0, 0], theta[:, 1, 1] = scale * mirrored, scale
    theta[:, :, 2] = (1 - scale)[:, None] * (2 * draw[2:4].reshape(2, n).T - 1)
    x = F.grid_sample(x, F.affine_grid(theta, list(x.shape), align_corners=False), align_corners=False)
    x = (x * (0.6 + 0.8 * draw[4])).clamp(0, 1)
    x = torch.lerp(x.mean((1, 2, 3), keepdim=True), x, 0.6 + 0.8 * draw[5]).clamp(0, 1)
    x = torch.lerp(x.mean(1, keepdim=True), x, 1.4 * draw[6]).clamp(0, 1)
    return (F.conv2d(x, blur, padding=4, groups=3) - 0.45) / 0.25


def encoder(width):
    layers, before = [], 3
    for channels, stride in ((width, 2), (2 * width, 2), (2 * width, 1), (4 * width, 2), (4 * width, 1)):
        layers += [nn.Conv2d(before, channels, 3, stride, 1, bias=False), nn.BatchNorm2d(channels), nn.ReLU(True)]
        before = channels
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(before, 128))


def contrast(a, b, temperature=0.2):
    z = F.normalize(torch.cat([a, b]).float(), dim=1)
    similar = (z @ z.T / temperature).fill_diagonal_(-1e4)
    n = len(a)
    return F.cross_entropy(similar, torch.arange(2 * n, device=z.device).roll(n))


def train(opt):
    count, side, batch, width = (32, 16, 8, 4) if opt.tiny else (2048, 128, 64, 64)
    loader = DataLoader(Pairs(count, side, raw=opt.fixed), batch_size=batch, shuffle=True, drop_last=True)
    model, blur = encoder(width).to(device, memory_format=torch.channels_last), gaussian().to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, fused=True)
    done = 0
    while True:
        for one, other in loader:
            one, other = one.to(device), other.to(device)
            if opt.fixed:
                one, other = augmented_on_device(one, blur), augmented_on_device(other, blur)
            with torch.autocast(device.type, torch.bfloat16):
                both = model(torch.cat([one, other]).contiguous(memory_format=torch.channels_last))
            loss = contrast(*both.chunk(2))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            done += 1
            if done == opt.steps:
                return loss.item()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--fixed", action="store_true")
    parser.add_argument("--steps", type=int, default=160)
    parser.add_argument("--tiny", action="store_true", default=device.type == "cpu")
    torch.manual_seed(0)
    torch.backends.cudnn.benchmark = True
    print("loss", train(parser.parse_args()))
