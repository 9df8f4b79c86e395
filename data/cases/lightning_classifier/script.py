import json
import sys
from collections import defaultdict

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset


class Shapes(Dataset):
    """Noisy discs and squares of 24 by 24 pixels."""

    def __init__(self, count, seed):
        rng = np.random.default_rng(seed)
        self.labels = rng.integers(0, 2, count)
        self.centres = rng.uniform(8, 16, (count, 2))
        self.noise = rng.normal(0, 0.5, (count, 24, 24)).astype(np.float32)

    def __len__(self):
        return len(self.labels)

    def __getitem__(self, index):
        picture = np.zeros((24, 24), dtype=np.float32)
        cy, cx = self.centres[index]
        for y in range(24):
            for x in range(24):
                dy, dx = abs(y - cy), abs(x - cx)
                inside = dy * dy + dx * dx < 36 if self.labels[index] else max(dy, dx) < 5.3
                picture[y, x] = 1.0 if inside else 0.0
        return torch.from_numpy(picture + self.noise[index])[None], int(self.labels[index])


class LightningModule(nn.Module):
    """The part of the interface that is used here."""

    def __init__(self):
        super().__init__()
        self.logged = defaultdict(list)

    def log(self, name, value):
        self.logged[name].append(value)


class Classifier(LightningModule):
    def __init__(self, lr):
        super().__init__()
        self.lr = lr
        self.body = nn.Sequential(
            nn.Conv2d(1, 8, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
            nn.Conv2d(8, 16, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(576, 2),
        )

    def forward(self, x):
        return self.body(x)

    def training_step(self, batch, batch_idx):
        x, y = batch
        logits = self(x)
        loss = F.cross_entropy(logits, y)
        correct = 0
        for row, label in zip(self(x), y):
            correct += int(row.argmax().item() == label.item())
        self.log("train_loss", loss.item())
        self.log("train_acc", correct / len(y))
        return loss

    def validation_step(self, batch, batch_idx):
        x, y = batch
        self.log("val_loss", F.cross_entropy(self(x), y).item())

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=self.lr, momentum=0.9)


class Trainer:
    def __init__(self, max_epochs):
        self.max_epochs = max_epochs

    def fit(self, module, train_loader, val_loader):
        optimizer = module.configure_optimizers()
        for epoch in range(self.max_epochs):
            module.train()
            for index, batch in enumerate(train_loader):
                loss = module.training_step(batch, index)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                with open("metrics.json", "w") as file:
                    json.dump(module.logged, file)
            module.eval()
            with torch.no_grad():
                for index, batch in enumerate(val_loader):
                    module.validation_step(batch, index)
            with open("metrics.json", "w") as file:
                json.dump(module.logged, file)
            print(f"epoch {epoch}: val_loss={np.mean(module.logged['val_loss']):.5f}")


if __name__ == "__main__":
    torch.manual_seed(0)
    train_set, val_set = Shapes(512, 0), Shapes(64, 1)
    train_loader = DataLoader(train_set, batch_size=32, shuffle=True)
    val_loader = DataLoader(val_set, batch_size=32)
    Trainer(int(sys.argv[1])).fit(Classifier(0.01), train_loader, val_loader)
