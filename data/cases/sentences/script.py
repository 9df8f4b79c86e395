import argparse
import random
import torch
from torch import nn
from torch.utils.data import DataLoader
parser = argparse.ArgumentParser()
parser.add_argument('--steps', type=int, default=10 ** 9)
args = parser.parse_args()
torch.manual_seed(0)
lengths = torch.randint(5, 60, (4096,)).tolist()
samples = [torch.randint(1, 1000, (n,)) for n in lengths]


def collate(batch):
    width = 256
    ids = torch.zeros(len(batch), width, dtype=torch.long)
    for row, sample in enumerate(batch):
        ids[row, :len(sample)] = sample
    return ids


order = torch.randperm(4096).tolist()
batches = [order[i:i + 16] for i in range(0, 4096, 16)]
random.Random(0).shuffle(batches)
loader = DataLoader(samples, batch_sampler=batches, collate_fn=collate)
layer = nn.TransformerEncoderLayer(64, 4, 128, batch_first=True)
model = nn.Sequential(nn.Embedding(1000, 64), layer, nn.Linear(64, 1000))
optimizer = torch.optim.AdamW(model.parameters(), fused=True)
step = 0
while step < args.steps:
    for ids in loader:
        loss = nn.functional.cross_entropy(model(ids).flatten(0, 1), ids.flatten(), ignore_index=0)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        step += 1
        if step >= args.steps:
            break
