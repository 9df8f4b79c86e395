# %% [markdown]
# # Store sales - FT-Transformer, 3 folds
# single notebook, CPU friendly

# %%
import gc
import os
import random
import time

import numpy as np
import pandas as pd
import torch
import torch.nn as nn
from sklearn.model_selection import KFold
from sklearn.preprocessing import LabelEncoder, StandardScaler


class CFG:
    seed = 2024
    n_fold = 3
    epochs = 16
    batch_size = 448
    lr = 1e-3
    weight_decay = 1e-5
    dim = 48
    heads = 4
    layers = 2
    max_norm = 1.0
    print_freq = 20
    target = "sales"


def seed_everything(seed):
    random.seed(seed)
    os.environ["PYTHONHASHSEED"] = str(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)


seed_everything(CFG.seed)

# %%
N = 30_000
df = pd.DataFrame({
    "store": np.random.choice([f"S{i:03d}" for i in range(120)], N),
    "family": np.random.choice(["GROCERY", "DAIRY", "BREAD", "CLEANING", "DELI", "MEATS", "BEVERAGES"], N),
    "city": np.random.choice([f"city_{i}" for i in range(22)], N),
    "holiday": np.random.choice(["none", "local", "national"], N, p=[0.85, 0.08, 0.07]),
    "date": pd.Timestamp("2021-01-01") + pd.to_timedelta(np.random.randint(0, 900, N), unit="D"),
    "onpromotion": np.random.poisson(3, N),
    "oil": np.random.normal(70, 12, N),
    "transactions": np.random.gamma(4, 300, N),
})
df["month"] = df.date.dt.month.astype(str)
df["dow"] = df.date.dt.dayofweek.astype(str)
df["payday"] = df.date.dt.day.isin([1, 15, 30]).astype(int)
df["trend"] = (df.date - df.date.min()).dt.days
store_effect = dict(zip(sorted(df.store.unique()), np.random.randn(120) * 0.4))
family_effect = dict(zip(df.family.unique(), np.random.randn(7)))
df["sales"] = (
    3 + df.store.map(store_effect) + df.family.map(family_effect) + 0.08 * df.onpromotion
    + 0.3 * df.dow.isin(["5", "6"]) + 0.2 * df.payday + 0.0004 * df.transactions + np.random.normal(0, 0.25, N))

# %%
cat_features = ["store", "family", "city", "holiday", "month", "dow"]
num_features = ["onpromotion", "oil", "transactions", "payday", "trend"]
for c in cat_features:
    df[c] = LabelEncoder().fit_transform(df[c])
df[num_features] = StandardScaler().fit_transform(df[num_features])
cardinality = [int(df[c].max()) + 1 for c in cat_features]
for fold, (_, va) in enumerate(KFold(CFG.n_fold, shuffle=True, random_state=CFG.seed).split(df)):
    df.loc[va, "fold"] = fold


# %%
class FTTransformer(nn.Module):
    def __init__(self):
        super().__init__()
        offsets = np.concatenate([[0], np.cumsum(cardinality)[:-1]])
        self.register_buffer("offsets", torch.from_numpy(offsets))
        self.cat = nn.Embedding(sum(cardinality), CFG.dim)
        self.num_w = nn.Parameter(torch.randn(len(num_features), CFG.dim) * 0.1)
        self.num_b = nn.Parameter(torch.zeros(len(num_features), CFG.dim))
        self.cls = nn.Parameter(torch.randn(1, 1, CFG.dim) * 0.1)
        layer = nn.TransformerEncoderLayer(CFG.dim, CFG.heads, 2 * CFG.dim, dropout=0.0, activation="gelu",
                                           batch_first=True, norm_first=True)
        self.encoder = nn.TransformerEncoder(layer, CFG.layers, enable_nested_tensor=False)
        self.head = nn.Sequential(nn.LayerNorm(CFG.dim), nn.ReLU(), nn.Linear(CFG.dim, 1))

    def forward(self, cats, nums):
        tokens = torch.cat([
            self.cls.expand(len(cats), -1, -1),
            self.cat(cats + self.offsets),
            nums[:, :, None] * self.num_w + self.num_b], 1)
        return self.head(self.encoder(tokens)[:, 0]).squeeze(1)


class AverageMeter:
    def __init__(self):
        self.sum = self.count = 0

    def update(self, val, n=1):
        self.sum += val * n
        self.count += n

    @property
    def avg(self):
        return self.sum / self.count


def to_tensors(frame):
    return (torch.from_numpy(frame[cat_features].to_numpy("int64")),
            torch.from_numpy(frame[num_features].to_numpy("float32")),
            torch.from_numpy(frame[CFG.target].to_numpy("float32")))


def train_fn(fold, epoch, data, model, optimizer, scheduler, criterion):
    model.train()
    losses, start = AverageMeter(), time.time()
    batches = torch.randperm(len(data[0])).split(CFG.batch_size)
    for step, idx in enumerate(batches):
        cats, nums, y = (t[idx] for t in data)
        loss = criterion(model(cats, nums), y)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), CFG.max_norm, foreach=True)
        optimizer.step()
        scheduler.step()
        losses.update(loss.item(), len(y))
        if step % CFG.print_freq == 0 or step == len(batches) - 1:
            print(f"Fold {fold} Epoch {epoch + 1} [{step}/{len(batches)}] Elapsed {time.time() - start:.0f}s "
                  f"Loss {losses.avg:.4f} LR {scheduler.get_last_lr()[0]:.6f}", flush=True)
    return losses.avg


@torch.no_grad()
def valid_fn(data, model):
    model.eval()
    preds = [model(c, n) for c, n in zip(data[0].split(1024), data[1].split(1024))]
    return torch.cat(preds).numpy()


# %%
oof = np.zeros(len(df), np.float32)
for fold in range(CFG.n_fold):
    trn = to_tensors(df[df.fold != fold])
    val_frame = df[df.fold == fold]
    val = to_tensors(val_frame)
    model = FTTransformer()
    optimizer = torch.optim.AdamW(model.parameters(), lr=CFG.lr, weight_decay=CFG.weight_decay, fused=True)
    steps = CFG.epochs * -(-len(trn[0]) // CFG.batch_size)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, CFG.lr * 3, total_steps=steps)
    for epoch in range(CFG.epochs):
        train_fn(fold, epoch, trn, model, optimizer, scheduler, nn.MSELoss())
    oof[val_frame.index] = valid_fn(val, model)
    print(f"========== fold: {fold} rmse {np.sqrt(np.mean((oof[val_frame.index] - val_frame.sales) ** 2)):.4f}", flush=True)
    del model, optimizer
    gc.collect()

# %%
print("CV", np.sqrt(np.mean((oof - df.sales) ** 2)))
