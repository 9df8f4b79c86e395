"""Molecule-like graph regression: disjoint-union batches, GINE convolutions, scatter by index_add."""
import os.path as osp
import time
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
import torch.nn.functional as F
from torch.utils.data import DataLoader, Dataset


class Data(NamedTuple):
    x: Tensor
    edge_index: Tensor
    edge_attr: Tensor
    y: Tensor


class Batch(NamedTuple):
    x: Tensor
    edge_index: Tensor
    edge_attr: Tensor
    y: Tensor
    batch: Tensor
    num_graphs: int

    @classmethod
    def from_data_list(cls, items):
        sizes = torch.tensor([len(d.x) for d in items])
        starts = F.pad(sizes.cumsum(0), (1, 0))[:-1]
        n_edges = torch.tensor([d.edge_index.shape[1] for d in items])
        edge_index = torch.cat([d.edge_index for d in items], 1) + starts.repeat_interleave(n_edges)
        return cls(torch.cat([d.x for d in items]), edge_index, torch.cat([d.edge_attr for d in items]),
                   torch.stack([d.y for d in items]), torch.arange(len(items)).repeat_interleave(sizes), len(items))


class RandomMolecules(Dataset):
    def __init__(self, n, seed):
        rng = np.random.default_rng(seed)
        self.items = [self.build(rng) for _ in range(n)]

    @staticmethod
    def build(rng):
        n = int(rng.integers(14, 34))
        atoms = rng.integers(0, 9, n)
        parents = (rng.random(n - 1) * np.arange(1, n)).astype(np.int64)
        extra = rng.integers(0, n, (2, n // 5))
        src = np.concatenate([np.arange(1, n), extra[0]])
        dst = np.concatenate([parents, extra[1]])
        bonds = rng.integers(0, 4, len(src))
        y = atoms[src] @ (bonds + 1) / n / 10 + 0.3 * np.cos(len(src) - n) + 0.02 * rng.standard_normal()
        ei = torch.from_numpy(np.stack([np.r_[src, dst], np.r_[dst, src]]))
        return Data(torch.from_numpy(atoms), ei, torch.from_numpy(np.r_[bonds, bonds]), torch.tensor(y, dtype=torch.float32))

    def __len__(self):
        return len(self.items)

    def __getitem__(self, i):
        return self.items[i]


def scatter_sum(src, index, size):
    return src.new_zeros(size, src.shape[1]).index_add_(0, index, src)


class GINEConv(nn.Module):
    def __init__(self, dim, n_bonds):
        super().__init__()
        self.bond = nn.Embedding(n_bonds, dim)
        self.eps = nn.Parameter(torch.zeros(1))
        self.mlp = nn.Sequential(nn.Linear(dim, 2 * dim), nn.BatchNorm1d(2 * dim), nn.ReLU(), nn.Linear(2 * dim, dim))

    def forward(self, x, edge_index, edge_attr):
        msg = F.relu(x.index_select(0, edge_index[0]) + self.bond(edge_attr))
        return self.mlp((1 + self.eps) * x + scatter_sum(msg, edge_index[1], len(x)))


class Net(nn.Module):
    def __init__(self, dim=128, layers=4):
        super().__init__()
        self.atom = nn.Embedding(9, dim)
        self.convs = nn.ModuleList([GINEConv(dim, 4) for _ in range(layers)])
        self.norms = nn.ModuleList([nn.BatchNorm1d(dim) for _ in range(layers)])
        self.readout = nn.Sequential(nn.Linear(dim, dim), nn.ReLU(), nn.Linear(dim, 1))

    def forward(self, data):
        x = self.atom(data.x)
        for conv, norm in zip(self.convs, self.norms):
            x = x + F.relu(norm(conv(x, data.edge_index, data.edge_attr)))
        counts = torch.bincount(data.batch, minlength=data.num_graphs)[:, None]
        return self.readout(scatter_sum(x, data.batch, data.num_graphs) / counts).squeeze(1)


torch.manual_seed(12345)
name = osp.splitext(osp.basename(__file__))[0]
train_loader = DataLoader(RandomMolecules(4000, 0), batch_size=128, shuffle=True, collate_fn=Batch.from_data_list)
test_loader = DataLoader(RandomMolecules(256, 1), batch_size=256, collate_fn=Batch.from_data_list)
model = Net()
optimizer = torch.optim.Adam(model.parameters(), lr=2e-3, fused=True)
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=20, gamma=0.5)


def train():
    model.train()
    total_loss = 0
    for data in train_loader:
        optimizer.zero_grad()
        loss = F.smooth_l1_loss(model(data), data.y)
        loss.backward()
        optimizer.step()
        total_loss += loss.item() * data.num_graphs
    scheduler.step()
    return total_loss / len(train_loader.dataset)


@torch.no_grad()
def test():
    model.eval()
    return sum((model(d) - d.y).abs().sum().item() for d in test_loader) / len(test_loader.dataset)


for epoch in range(1, 81):
    start = time.time()
    loss = train()
    mae = f", Test MAE: {test():.4f}" if epoch % 4 == 0 else ""
    print(f"{name} Epoch: {epoch:03d}, Loss: {loss:.4f}{mae}, {time.time() - start:.1f}s", flush=True)
