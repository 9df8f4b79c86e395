"""A classifier of images that logs its loss and drops bad samples in every step."""

import argparse

import torch
import torch.nn.functional as F
from torch import nn

parser = argparse.ArgumentParser()
parser.add_argument("--fixed", action="store_true")
parser.add_argument("--steps", type=int, default=2000)
parser.add_argument("--device", default="cuda")
args = parser.parse_args()

torch.manual_seed(0)
layers = [nn.Sequential(nn.Linear(1024, 1024), nn.GELU(), nn.LayerNorm(1024)) for _ in range(12)]
net = nn.Sequential(*layers, nn.Linear(1024, 10)).to(args.device)
optimizer = torch.optim.AdamW(net.parameters(), lr=1e-4, fused=True)
images = torch.randn(4096, 1024, device=args.device)
labels = torch.randint(0, 10, (4096,), device=args.device)
running, history = torch.zeros((), device=args.device), []
for step in range(args.steps):
    start = 256 * (step % 16)
    x, y = images[start : start + 256], labels[start : start + 256]
    logits = net(x)
    losses = F.cross_entropy(logits, y, reduction="none")
    if args.fixed:
        loss = torch.where(losses < 20, losses, 0).mean()
        running += loss.detach()
    else:
        loss = losses[losses < 20].mean()
        history.append(loss.item())
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
print("loss", running.item() / args.steps if args.fixed else sum(history) / len(history))
