#!/usr/bin/env python3
"""Small-image classification; create_model / mixup / EMA / cosine schedule in the timm spirit."""
import argparse
import copy
import logging
import math
import time
from collections import OrderedDict

import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F

_logger = logging.getLogger("train")
_MODELS = {}


def register_model(fn):
    _MODELS[fn.__name__] = fn
    return fn


def create_model(name, **kw):
    return _MODELS[name](**kw)


class ConvNormAct(nn.Sequential):
    def __init__(self, cin, cout, k=3, stride=1, act=True):
        super().__init__(nn.Conv2d(cin, cout, k, stride, k // 2, bias=False), nn.BatchNorm2d(cout),
                         nn.ReLU(inplace=True) if act else nn.Identity())


class Residual(nn.Module):
    def __init__(self, cin, cout, stride):
        super().__init__()
        self.conv1 = ConvNormAct(cin, cout, stride=stride)
        self.conv2 = ConvNormAct(cout, cout, act=False)
        self.skip = ConvNormAct(cin, cout, 1, stride, act=False) if stride > 1 or cin != cout else nn.Identity()

    def forward(self, x):
        return F.relu(self.conv2(self.conv1(x)) + self.skip(x))


class ResNet(nn.Module):
    def __init__(self, widths, depths, num_classes, drop=0.0):
        super().__init__()
        self.stem = ConvNormAct(3, widths[0])
        stages, c = [], widths[0]
        for i, (w, d) in enumerate(zip(widths, depths)):
            for j in range(d):
                stages.append(Residual(c, w, 2 if i and not j else 1))
                c = w
        self.stages, self.drop = nn.Sequential(*stages), drop
        self.head = nn.Linear(c, num_classes)

    def forward(self, x):
        x = self.stages(self.stem(x)).mean((2, 3))
        return self.head(F.dropout(x, self.drop, self.training))


@register_model
def resnet_tiny(num_classes=10, **kw):
    return ResNet((24, 48, 96), (1, 1, 1), num_classes, **kw)


@register_model
def resnet_mini(num_classes=10, **kw):
    return ResNet((32, 64, 128), (1, 2, 1), num_classes, **kw)


class ModelEma:
    def __init__(self, model, decay):
        self.module, self.decay = copy.deepcopy(model).eval(), decay
        self.pairs = ([p for p in self.module.parameters()], [p for p in model.parameters()])
        self.buffers = (list(self.module.buffers()), list(model.buffers()))

    @torch.no_grad()
    def update(self):
        torch._foreach_lerp_(self.pairs[0], self.pairs[1], 1 - self.decay)
        torch._foreach_copy_(self.buffers[0], self.buffers[1])


class Mixup:
    def __init__(self, alpha, num_classes, smoothing):
        self.beta = torch.distributions.Beta(alpha, alpha)
        self.k, self.smoothing = num_classes, smoothing

    def __call__(self, x, y):
        lam = self.beta.sample().item()
        soft = F.one_hot(y, self.k).float() * (1 - self.smoothing) + self.smoothing / self.k
        return torch.lerp(x.flip(0), x, lam), torch.lerp(soft.flip(0), soft, lam)


class ArrayLoader:
    """uint8 images kept in memory; crop, flip and normalise whole batches at once."""

    def __init__(self, images, labels, batch_size, training, pad=3):
        self.images, self.labels, self.bs, self.training, self.pad = images, labels, batch_size, training, pad

    def __len__(self):
        return len(self.labels) // self.bs

    def __iter__(self):
        order = torch.randperm(len(self.labels)) if self.training else torch.arange(len(self.labels))
        for idx in order.split(self.bs)[: len(self)]:
            x = self.images[idx].float().div_(127.5).sub_(1)
            if self.training:
                dy, dx = np.random.randint(0, 2 * self.pad + 1, 2)
                h, w = x.shape[-2:]
                x = F.pad(x, (self.pad,) * 4)[:, :, dy : dy + h, dx : dx + w]
                if np.random.rand() < 0.5:
                    x = x.flip(3)
            yield x.contiguous(memory_format=torch.channels_last), self.labels[idx]


def textured_images(n, classes, size, seed):
    g = torch.Generator().manual_seed(seed)
    labels = torch.randint(0, classes, (n,), generator=g)
    grid = torch.arange(size).float()
    freq = 0.25 + 0.12 * labels[:, None, None].float()
    phase = 6.28 * torch.rand(n, 1, 1, generator=g)
    wave = torch.sin(freq * grid[None, :, None] + phase) * torch.cos(freq * 0.7 * grid[None, None, :] - phase)
    x = 0.5 + 0.3 * wave[:, None] * torch.rand(n, 3, 1, 1, generator=g) + 0.1 * torch.randn(n, 3, size, size, generator=g)
    return (x.clamp(0, 1) * 255).byte(), labels


@torch.no_grad()
def validate(model, loader):
    hits = sum((model(x).argmax(1) == y).sum().item() for x, y in loader)
    return OrderedDict(top1=100 * hits / (len(loader) * loader.bs))


def main():
    p = argparse.ArgumentParser()
    p.add_argument("--model", default="resnet_tiny")
    p.add_argument("-b", "--batch-size", type=int, default=64)
    p.add_argument("--epochs", type=int, default=40)
    p.add_argument("--lr", type=float, default=0.1)
    p.add_argument("--momentum", type=float, default=0.9)
    p.add_argument("--weight-decay", type=float, default=5e-4)
    p.add_argument("--mixup", type=float, default=0.3)
    p.add_argument("--smoothing", type=float, default=0.05)
    p.add_argument("--model-ema-decay", type=float, default=0.99)
    p.add_argument("--log-interval", type=int, default=25)
    args = p.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    torch.manual_seed(42)
    np.random.seed(42)

    train = ArrayLoader(*textured_images(5000, 10, 32, 0), args.batch_size, training=True)
    val = ArrayLoader(*textured_images(256, 10, 32, 1), 128, training=False)
    model = create_model(args.model, drop=0.1).to(memory_format=torch.channels_last)
    ema = ModelEma(model, args.model_ema_decay)
    optimizer = torch.optim.SGD(model.parameters(), lr=args.lr, momentum=args.momentum, nesterov=True,
                                weight_decay=args.weight_decay, fused=True)
    mixup = Mixup(args.mixup, 10, args.smoothing)
    total = args.epochs * len(train)
    step = 0
    for epoch in range(args.epochs):
        model.train()
        end = time.time()
        for i, (x, y) in enumerate(train):
            optimizer.param_groups[0]["lr"] = args.lr * 0.5 * (1 + math.cos(math.pi * step / total))
            x, y = mixup(x, y)
            loss = F.cross_entropy(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            ema.update()
            step += 1
            if i % args.log_interval == 0:
                _logger.info(f"Train: {epoch} [{i:>4d}/{len(train)}] Loss: {loss.item():.3f} "
                             f"Time: {(time.time() - end) / (i + 1):.3f}s")
        _logger.info(f"*** epoch {epoch} ema {dict(validate(ema.module, val))}")


if __name__ == "__main__":
    main()
