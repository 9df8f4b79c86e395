"""A recurrent cell, written out: each time step is a dozen kernels of a microsecond each."""

import argparse

import torch
from torch import nn


class Cell(nn.Module):
    def __init__(self, width: int):
        super().__init__()
        self.gates = nn.Linear(2 * width, 4 * width)

    def forward(self, x, state):
        h, c = state
        i, f, g, o = self.gates(torch.cat([x, h], 1)).chunk(4, 1)
        c = torch.sigmoid(f) * c + torch.sigmoid(i) * torch.tanh(g)
        return torch.sigmoid(o) * torch.tanh(c), c


class Model(nn.Module):
    def __init__(self, width: int, fixed: bool):
        super().__init__()
        self.width, self.fixed = width, fixed
        self.cell = nn.LSTM(width, width) if fixed else Cell(width)
        self.out = nn.Linear(width, 1)

    def forward(self, x):  # (T, B, C)
        if self.fixed:
            return self.out(self.cell(x)[0][-1])
        state = (x.new_zeros(x.shape[1], self.width), x.new_zeros(x.shape[1], self.width))
        for each in x:
            state = self.cell(each, state)
        return self.out(state[0])


def run(options):
    model = Model(128, options.fixed).to(options.device)
    optimizer = torch.optim.Adam(model.parameters(), fused=True)
    series = torch.randn(100 if options.device == "cuda" else 8, 64, 128, device=options.device)
    for _ in range(options.steps):
        loss = (model(series) - series.mean(0)[:, :1]).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


cli = argparse.ArgumentParser()
cli.add_argument("--fixed", action="store_true")
cli.add_argument("--steps", type=int, default=300)
cli.add_argument("--device", default="cuda")
run(cli.parse_args())
