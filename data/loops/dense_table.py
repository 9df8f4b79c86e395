"""An embedding of 400,000 rows, of which a batch reads 4,096, with gradients for all of them."""

import argparse

import torch
from torch import nn

parser = argparse.ArgumentParser()
parser.add_argument("--fixed", action="store_true")
parser.add_argument("--steps", type=int, default=10**9)
args = parser.parse_args()
torch.manual_seed(0)
ROWS, WIDTH, BATCH = 400_000, 16, 4096


class Ratings(nn.Module):
    def __init__(self):
        super().__init__()
        self.items = nn.Embedding(ROWS, WIDTH, sparse=args.fixed)
        self.head = nn.Sequential(nn.Linear(WIDTH, 256), nn.ReLU(), nn.Linear(256, 1))

    def forward(self, ids):
        return self.head(self.items(ids)).squeeze(-1)


model = Ratings()
sgd = torch.optim.SGD(model.parameters(), lr=0.05)
for step in range(args.steps):
    ids, stars = torch.randint(ROWS, (BATCH,)), torch.rand(BATCH)
    sgd.zero_grad()
    nn.functional.mse_loss(model(ids), stars).backward()
    sgd.step()
