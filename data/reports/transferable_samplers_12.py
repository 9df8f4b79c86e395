"""Flow matching on small peptides with rotation and noise augmentation."""

import os
import time

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

CFG = {
    "seed": 12345,
    "data": {"num_samples": 3200, "num_atoms": 22, "batch_size": 16, "num_workers": 2, "cpus_per_task": 8},
    "model": {"hidden": 256, "depth": 3, "lr": 3e-4},
    "trainer": {"max_epochs": 20, "log_every_n_steps": 25},
}


class PeptideDataset(Dataset):
    def __init__(self, num_samples, num_atoms, seed=0):
        rng = np.random.default_rng(seed)
        steps = rng.standard_normal((num_samples, num_atoms, 3)).astype(np.float32)
        self.coords = torch.from_numpy(np.cumsum(steps, axis=1))
        self.projection = torch.from_numpy(rng.standard_normal((256, 256)).astype(np.float32)) / 16
        self.num_atoms = num_atoms

    def __len__(self):
        return len(self.coords)

    def augment(self, x):
        rotation, _ = torch.linalg.qr(torch.randn(3, 3))
        x = (x - x.mean(dim=0)) @ rotation.T
        noise = torch.randn(256, 256)
        for _ in range(3):
            noise = torch.tanh(noise @ self.projection)
        basis, _ = torch.linalg.qr(noise)
        return x + 0.05 * basis[: self.num_atoms, :3]

    def __getitem__(self, index):
        return self.augment(self.coords[index]).flatten()


class PeptideDataModule:
    def __init__(self, num_samples, num_atoms, batch_size, num_workers, cpus_per_task):
        self.dataset = PeptideDataset(num_samples, num_atoms)
        self.batch_size, self.num_workers, self.cpus_per_task = batch_size, num_workers, cpus_per_task

    def _init_worker(self, worker_id):
        torch.set_num_threads(self.cpus_per_task)
        np.random.seed(worker_id)

    def train_dataloader(self):
        return DataLoader(
            self.dataset,
            batch_size=self.batch_size,
            shuffle=True,
            drop_last=True,
            num_workers=self.num_workers,
            worker_init_fn=self._init_worker,
            persistent_workers=True,
        )


class FlowMatchLitModule(nn.Module):
    def __init__(self, dim, hidden, depth, lr):
        super().__init__()
        layers, width = [], dim + 1
        for _ in range(depth):
            layers += [nn.Linear(width, hidden), nn.SiLU()]
            width = hidden
        self.net = nn.Sequential(*layers, nn.Linear(width, dim))
        self.lr = lr

    def training_step(self, batch, batch_idx):
        x1, x0 = batch, torch.randn_like(batch)
        t = torch.rand(len(batch), 1)
        xt = (1 - t) * x0 + t * x1
        v = self.net(torch.cat([xt, t], dim=-1))
        return (v - (x1 - x0)).pow(2).mean()

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=self.lr)


class Trainer:
    def __init__(self, max_epochs, log_every_n_steps):
        self.max_epochs, self.log_every_n_steps = max_epochs, log_every_n_steps

    def fit(self, model, datamodule):
        optimizer = model.configure_optimizers()
        loader = datamodule.train_dataloader()
        step, last = 0, time.perf_counter()
        for epoch in range(self.max_epochs):
            for batch_idx, batch in enumerate(loader):
                loss = model.training_step(batch, batch_idx)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                step += 1
                if step % self.log_every_n_steps == 0:
                    now = time.perf_counter()
                    print(f"epoch {epoch} step {step} train/loss {loss.item():.4f} it/s {self.log_every_n_steps / (now - last):.1f}")
                    last = now


def train(cfg):
    torch.manual_seed(cfg["seed"])
    datamodule = PeptideDataModule(**cfg["data"])
    model = FlowMatchLitModule(dim=cfg["data"]["num_atoms"] * 3, **cfg["model"])
    Trainer(**cfg["trainer"]).fit(model, datamodule)


if __name__ == "__main__":
    os.environ.setdefault("HYDRA_FULL_ERROR", "1")
    train(CFG)
