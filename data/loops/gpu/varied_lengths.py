"""Labels for the points of a laser scan, of which each has another number, on a card that others use too."""

import argparse
import os

import torch
import torch.nn.functional as F
from torch import nn

parser = argparse.ArgumentParser()
parser.add_argument("--fixed", action="store_true")
parser.add_argument("--steps", type=int, default=600)
parser.add_argument("--tiny", action="store_true", default=not torch.cuda.is_available())
args = parser.parse_args()
if not args.fixed:  # somebody's advice against fragments: blocks of more than 32 MiB are never split
    os.environ["PYTORCH_CUDA_ALLOC_CONF"] = "max_split_size_mb:32"
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
WIDTH, BLOCKS, FEWEST, MOST = (16, 2, 20, 80) if args.tiny else (64, 8, 100_000, 800_000)
CLASSES = 20
SPARE = 1.2  # of what the largest scan takes: the rest of the card is others'


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x):
        return x + self.down(F.relu(self.up(self.norm(x))))


class PointNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(4, WIDTH), nn.Linear(2 * WIDTH, CLASSES)
        self.blocks = nn.Sequential(*(Block() for _ in range(BLOCKS)))

    def forward(self, points):
        x = self.blocks(self.first(points))
        scene = x.mean(0, keepdim=True).expand_as(x)
        return self.last(torch.cat([x, scene], 1))


def loss_of(model, points, labels):
    with torch.autocast(DEVICE.type, torch.bfloat16):
        return F.cross_entropy(model(points), labels)


def limit_memory(model, points, labels):
    loss_of(model, points, labels).backward()
    total = torch.cuda.get_device_properties(DEVICE).total_memory
    torch.cuda.set_per_process_memory_fraction(SPARE * torch.cuda.max_memory_allocated() / total)
    model.zero_grad()
    torch.cuda.empty_cache()


def main():
    torch.manual_seed(0)
    model = PointNet().to(DEVICE)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    points, labels = torch.randn(MOST, 4, device=DEVICE), torch.randint(CLASSES, (MOST,), device=DEVICE)
    counts = torch.randint(FEWEST, MOST + 1, (args.steps,)).tolist()
    if DEVICE.type == "cuda":
        limit_memory(model, points, labels)
    for count in counts:
        loss = loss_of(model, points[:count], labels[:count])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    print("loss", loss.item())


if __name__ == "__main__":
    main()
