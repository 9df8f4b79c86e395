"""Likelihood approximation network: an MLP trained on files of simulator output."""

import pickle
import tempfile
import time
from pathlib import Path

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

NETWORK_CONFIG = {"layer_sizes": [32, 32, 1], "activations": ["tanh", "tanh", "linear"]}
TRAIN_CONFIG = {
    "n_epochs": 120,
    "batch_size": 8192,
    "n_training_files": 6,
    "rows_per_file": 131072,
    "features_key": "lan_data",
    "labels_key": "lan_labels",
    "learning_rate": 1e-3,
    "weight_decay": 1e-4,
    "label_lower_bound": float(np.log(1e-7)),
}
FEATURES = ["v", "a", "z", "t", "rt", "choice"]


def make_training_files(folder, n_files, n_rows):
    for i in range(n_files):
        rng = np.random.default_rng(i)
        features = rng.uniform(-2, 2, (n_rows, len(FEATURES)))
        labels = -np.abs(features[:, 0] * features[:, 4]) - features[:, 1] ** 2 + rng.normal(0, 0.05, n_rows)
        labels[rng.random(n_rows) < 0.05] = -40.0
        with open(folder / f"training_data_{i}.pickle", "wb") as f:
            pickle.dump({"lan_data": features, "lan_labels": labels, "generator": "ddm"}, f)
    return sorted(folder.glob("*.pickle"))


class DatasetTorch(Dataset):
    """One item is one batch; files are opened as the index runs on."""

    def __init__(self, file_ids, batch_size, features_key, labels_key, label_lower_bound):
        self.file_ids, self.batch_size = file_ids, batch_size
        self.features_key, self.labels_key = features_key, labels_key
        self.label_lower_bound = label_lower_bound
        with open(file_ids[0], "rb") as f:
            self.file_rows = len(pickle.load(f)[features_key])
        self.batches_per_file = self.file_rows // batch_size
        self.tmp_data, self.indexes = None, None

    def __len__(self):
        return self.batches_per_file * len(self.file_ids)

    def _load_file(self, file_index):
        with open(self.file_ids[file_index], "rb") as f:
            self.tmp_data = pickle.load(f)
        self.indexes = np.random.choice(self.file_rows, self.file_rows, replace=False)

    def _get_sample(self, index):
        ids = self.indexes[index * self.batch_size : (index + 1) * self.batch_size]
        rows = [self.tmp_data[self.features_key][i] for i in ids]
        X = np.stack(rows).astype(np.float32)
        y = np.array([max(self.tmp_data[self.labels_key][i], self.label_lower_bound) for i in ids], dtype=np.float32)
        return X, y[:, None]

    def __getitem__(self, index):
        if index % self.batches_per_file == 0 or self.tmp_data is None:
            self._load_file(index // self.batches_per_file)
        X, y = self._get_sample(index % self.batches_per_file)
        return torch.from_numpy(X), torch.from_numpy(y)


class TorchMLP(nn.Module):
    def __init__(self, input_shape, layer_sizes, activations):
        super().__init__()
        self.layers = nn.ModuleList()
        for size, activation in zip(layer_sizes, activations):
            self.layers.append(nn.Linear(input_shape, size))
            if activation == "tanh":
                self.layers.append(nn.Tanh())
            input_shape = size

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


class ModelTrainerTorchMLP:
    def __init__(self, train_config, model, train_dl):
        self.train_config, self.model, self.train_dl = train_config, model, train_dl
        self.loss_fun = nn.HuberLoss()
        self.optimizer = torch.optim.Adam(
            model.parameters(), lr=train_config["learning_rate"], weight_decay=train_config["weight_decay"]
        )
        self.scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(self.optimizer, factor=0.5, patience=2)

    def train_model(self, verbose=1):
        for epoch in range(self.train_config["n_epochs"]):
            self.model.train()
            epoch_loss, begin = 0.0, time.time()
            for cnt, (xb, yb) in enumerate(self.train_dl):
                pred = self.model(xb)
                loss = self.loss_fun(pred, yb)
                loss.backward()
                self.optimizer.step()
                self.optimizer.zero_grad()
                epoch_loss += float(loss)
                if verbose and cnt % 50 == 0:
                    print(f"epoch: {epoch} / {self.train_config['n_epochs']}, batch: {cnt} / {len(self.train_dl)}, batch loss: {float(loss):.5f}")
            self.scheduler.step(epoch_loss / len(self.train_dl))
            print(f"Epoch took {epoch} / {self.train_config['n_epochs']},  took {time.time() - begin:.2f} seconds")


def main():
    torch.manual_seed(0)
    np.random.seed(0)
    cfg = TRAIN_CONFIG
    with tempfile.TemporaryDirectory() as folder:
        files = make_training_files(Path(folder), cfg["n_training_files"], cfg["rows_per_file"])
        dataset = DatasetTorch(files, cfg["batch_size"], cfg["features_key"], cfg["labels_key"], cfg["label_lower_bound"])
        train_dl = DataLoader(dataset, shuffle=False, batch_size=None, num_workers=0)
        net = TorchMLP(len(FEATURES), **NETWORK_CONFIG)
        ModelTrainerTorchMLP(cfg, net, train_dl).train_model()


if __name__ == "__main__":
    main()
