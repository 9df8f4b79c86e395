import argparse
import logging
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import pandas as pd
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

logger = logging.getLogger("__main__")

NUM_TIMESTEPS = 12
BANDS = ["B2", "B3", "B4", "B5", "B6", "B7", "B8", "B8A", "B11", "B12", "VV", "VH", "prec", "temp"]
STATIC = ["elevation", "slope", "lat", "lon"]
NODATAVALUE = 65535


def make_frame(num_rows: int, seed: int) -> pd.DataFrame:
    rng = np.random.default_rng(seed)
    season = np.sin(np.arange(NUM_TIMESTEPS) / NUM_TIMESTEPS * 2 * np.pi)
    labels = rng.integers(0, 2, num_rows)
    columns = {}
    for b, band in enumerate(BANDS):
        for t in range(NUM_TIMESTEPS):
            value = 2000 + 500 * season[t] * (1 + labels) + rng.normal(0, 400, num_rows) + 30 * b
            value[rng.random(num_rows) < 0.02] = NODATAVALUE
            columns[f"{band}-ts{t}"] = value.round().astype(np.float64)
    for name in STATIC:
        columns[name] = rng.normal(0, 1, num_rows)
    columns["LANDCOVER_LABEL"] = labels
    columns["sample_id"] = [f"wc_{i:07d}" for i in range(num_rows)]
    return pd.DataFrame(columns)


class WorldCerealDataset(Dataset):
    def __init__(self, dataframe: pd.DataFrame, mask_ratio: float = 0.0):
        self.df = dataframe
        self.mask_ratio = mask_ratio

    def __len__(self):
        return self.df.shape[0]

    @staticmethod
    def normalize(eo: np.ndarray, mask: np.ndarray) -> np.ndarray:
        eo = (eo - 2000.0) / 1000.0
        eo[mask] = 0.0
        return eo

    def row_to_arrays(self, row: pd.Series):
        eo_data = np.zeros((NUM_TIMESTEPS, len(BANDS)), dtype=np.float32)
        mask = np.zeros((NUM_TIMESTEPS, len(BANDS)), dtype=bool)
        for t in range(NUM_TIMESTEPS):
            for b, band in enumerate(BANDS):
                value = row[f"{band}-ts{t}"]
                eo_data[t, b] = value
                mask[t, b] = value == NODATAVALUE
        static = np.array([row[name] for name in STATIC], dtype=np.float32)
        return self.normalize(eo_data, mask), mask, static

    def __getitem__(self, idx):
        row = self.df.iloc[idx]
        eo, mask, static = self.row_to_arrays(row)
        label = np.float32(row["LANDCOVER_LABEL"])
        return torch.from_numpy(eo), torch.from_numpy(mask), torch.from_numpy(static), torch.tensor(label)


class Presto(nn.Module):
    def __init__(self, embed_dim=32, depth=2, heads=4):
        super().__init__()
        self.eo_embed = nn.Linear(len(BANDS) * 2, embed_dim)
        self.static_embed = nn.Linear(len(STATIC), embed_dim)
        self.pos_embed = nn.Parameter(torch.randn(1, NUM_TIMESTEPS + 1, embed_dim) * 0.02)
        layer = nn.TransformerEncoderLayer(embed_dim, heads, embed_dim * 2, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, depth, enable_nested_tensor=False)
        self.head = nn.Linear(embed_dim, 1)

    def forward(self, eo, mask, static):
        tokens = self.eo_embed(torch.cat([eo, mask.float()], dim=-1))
        tokens = torch.cat([self.static_embed(static).unsqueeze(1), tokens], dim=1) + self.pos_embed
        return self.head(self.encoder(tokens).mean(dim=1)).squeeze(-1)


def evaluate(model, dataloader):
    model.eval()
    correct = total = 0
    with torch.no_grad():
        for eo, mask, static, y in dataloader:
            correct += ((model(eo, mask, static) > 0).float() == y).sum().item()
            total += len(y)
    return correct / total


def main():
    argparser = argparse.ArgumentParser()
    argparser.add_argument("--n_epochs", type=int, default=30)
    argparser.add_argument("--max_learning_rate", type=float, default=1e-3)
    argparser.add_argument("--weight_decay", type=float, default=0.05)
    argparser.add_argument("--batch_size", type=int, default=64)
    argparser.add_argument("--num_rows", type=int, default=4096)
    argparser.add_argument("--seed", type=int, default=3431)
    args = argparser.parse_args()
    logging.basicConfig(level=logging.INFO)
    torch.manual_seed(args.seed)

    with TemporaryDirectory() as folder:
        path = Path(folder) / "train_df.pkl"
        make_frame(args.num_rows, args.seed).to_pickle(path)
        df = pd.read_pickle(path)
    val_df = df.sample(256, random_state=args.seed)
    train_df = df.drop(val_df.index)

    train_dataloader = DataLoader(
        WorldCerealDataset(train_df), batch_size=args.batch_size, shuffle=True, num_workers=0
    )
    val_dataloader = DataLoader(WorldCerealDataset(val_df), batch_size=256, shuffle=False, num_workers=0)

    model = Presto()
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.max_learning_rate, weight_decay=args.weight_decay)
    loss_fn = nn.BCEWithLogitsLoss()

    for epoch in range(args.n_epochs):
        model.train()
        epoch_loss = 0.0
        for step, (eo, mask, static, y) in enumerate(train_dataloader):
            optimizer.zero_grad()
            loss = loss_fn(model(eo, mask, static), y)
            loss.backward()
            optimizer.step()
            epoch_loss += loss.item()
            if step % 10 == 0:
                logger.info(f"epoch {epoch} {step}/{len(train_dataloader)}")
        accuracy = evaluate(model, val_dataloader)
        print(f"epoch {epoch} train_loss {epoch_loss / (step + 1):.4f} val_acc {accuracy:.3f}")


if __name__ == "__main__":
    main()
