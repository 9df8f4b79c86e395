"""Sums up losses with their graphs for a running mean."""

import argparse

import torch


class Meter:
    def __init__(self, detach):
        self.values, self.detach = [], detach

    def update(self, value):
        self.values.append(value.detach() if self.detach else value)


parser = argparse.ArgumentParser()
parser.add_argument("--fixed", action="store_true")
parser.add_argument("--steps", type=int, default=4000)
args = parser.parse_args()
meter = Meter(args.fixed)
body = torch.nn.Sequential(torch.nn.Linear(128, 512), torch.nn.Tanh(), torch.nn.Linear(512, 128))
sgd = torch.optim.SGD(body.parameters(), lr=0.1, fused=True)
for _ in range(args.steps):
    x = torch.randn(256, 128)
    y = body(x)
    loss = (y - x).abs().mean()
    sgd.zero_grad()
    loss.backward()
    sgd.step()
    meter.update(y.square().mean() + loss)
