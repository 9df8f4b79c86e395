#!/usr/bin/env python
# coding: utf-8

# # Click-through rate: DeepFM baseline
# exported from `03_deepfm.ipynb`

# In[1]:


import time

import numpy as np
import pandas as pd
import torch
import torch.nn as nn
import torch.nn.functional as F
from sklearn.metrics import roc_auc_score
from sklearn.preprocessing import StandardScaler

np.random.seed(42)
torch.manual_seed(42);


# ## Data

# In[2]:


N = 160_000
CARD = [24, 7, 500, 1200, 90, 12, 300, 60, 31, 2000, 5, 150, 80, 40, 900, 16]
cat_cols = [f"C{i}" for i in range(len(CARD))]
num_cols = [f"I{i}" for i in range(10)]

df = pd.DataFrame({c: (np.random.zipf(1.4, N) - 1) % k for c, k in zip(cat_cols, CARD)})
df[num_cols] = np.random.lognormal(0, 1, (N, len(num_cols)))
effects = [np.random.randn(k) * 0.5 for k in CARD]
logit = sum(e[df[c]] for e, c in zip(effects, cat_cols)) + 0.4 * np.log(df.I0) - 0.5 * np.log(df.I1) - 1.2
df["click"] = (np.random.rand(N) < 1 / (1 + np.exp(-logit))).astype("float32")
df.head()


# In[3]:


df[num_cols] = StandardScaler().fit_transform(np.log1p(df[num_cols]))
offsets = np.concatenate([[0], np.cumsum(CARD)[:-1]])
cats = torch.from_numpy(df[cat_cols].to_numpy("int64") + offsets)
nums = torch.from_numpy(df[num_cols].to_numpy("float32"))
target = torch.from_numpy(df.click.to_numpy("float32"))

perm = torch.randperm(N)
va, tr = perm[:8000], perm[8000:]
len(tr), len(va), target.mean().item()


# ## Model

# In[4]:


class DeepFM(nn.Module):
    def __init__(self, total, n_fields, n_num, k=16, hidden=(384, 192)):
        super().__init__()
        self.emb = nn.Embedding(total, k)
        self.lin = nn.Embedding(total, 1)
        nn.init.normal_(self.emb.weight, std=0.05)
        nn.init.zeros_(self.lin.weight)
        self.num_lin = nn.Linear(n_num, 1)
        layers, d = [], n_fields * k + n_num
        for h in hidden:
            layers += [nn.Linear(d, h), nn.ReLU(), nn.BatchNorm1d(h)]
            d = h
        self.mlp = nn.Sequential(*layers, nn.Linear(d, 1))

    def forward(self, c, x):
        e = self.emb(c)
        fm = 0.5 * (e.sum(1).square() - e.square().sum(1)).sum(1)
        wide = self.lin(c).sum((1, 2)) + self.num_lin(x).squeeze(1)
        deep = self.mlp(torch.cat([e.flatten(1), x], 1)).squeeze(1)
        return wide + fm + deep


model = DeepFM(sum(CARD), len(CARD), len(num_cols))
opt = torch.optim.Adam(model.parameters(), lr=1e-3, fused=True)
sum(p.numel() for p in model.parameters())


# ## Training

# In[5]:


BATCH = 640
EPOCHS = 30
LOG_EVERY = 50

history = []
for epoch in range(EPOCHS):
    model.train()
    t0 = time.time()
    seen_y, seen_p, losses = [], [], []
    order = tr[torch.randperm(len(tr))]
    for it, idx in enumerate(order.split(BATCH)):
        c, x, y = cats[idx], nums[idx], target[idx]
        out = model(c, x)
        loss = F.binary_cross_entropy_with_logits(out, y)
        opt.zero_grad()
        loss.backward()
        opt.step()

        losses.append(loss.item())
        seen_y.append(y.numpy())
        seen_p.append(out.detach().numpy())
        if it > 0:
            train_auc = roc_auc_score(np.concatenate(seen_y), np.concatenate(seen_p))
            history.append({"epoch": epoch, "iter": it, "loss": losses[-1], "auc": train_auc})
        if it % LOG_EVERY == LOG_EVERY - 1:
            print(f"ep {epoch} it {it + 1}  loss {np.mean(losses[-LOG_EVERY:]):.4f}  auc {train_auc:.4f}", flush=True)

    model.eval()
    with torch.no_grad():
        p = torch.cat([model(cats[i], nums[i]) for i in va.split(4000)])
    print(f"epoch {epoch}: valid auc {roc_auc_score(target[va].numpy(), p.numpy()):.4f}  {time.time() - t0:.1f}s", flush=True)


# In[6]:


pd.DataFrame(history).groupby("epoch")[["loss", "auc"]].last()
