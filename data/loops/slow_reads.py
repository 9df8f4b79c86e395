"""Samples that come from a slow disk, read by the process that trains."""

import argparse
import time

import torch
from torch.utils.data import DataLoader, Dataset

p = argparse.ArgumentParser()
p.add_argument("--fixed", action="store_true")
p.add_argument("--steps", type=int, default=10**9)
a = p.parse_args()


class OnDisk(Dataset):
    def __len__(self):
        return 100_000

    def __getitem__(self, index):
        time.sleep(0.002)  # a seek
        return torch.full((3, 16, 16), float(index % 7)), index % 7


if __name__ == "__main__":
    workers = {"num_workers": 4, "persistent_workers": True} if a.fixed else {}
    loader = DataLoader(OnDisk(), batch_size=16, **workers)
    net = torch.nn.Sequential(torch.nn.Conv2d(3, 16, 3), torch.nn.ReLU(), torch.nn.Flatten(), torch.nn.Linear(3136, 7))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, fused=True)
    for step, (images, labels) in enumerate(loader):
        if step >= a.steps:
            break
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(net(images), labels).backward()
        optimizer.step()
