"""Tokenises a line each time that it is asked for."""

import re
import sys

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

FIXED = "--fixed" in sys.argv
STEPS = int(sys.argv[sys.argv.index("--steps") + 1]) if "--steps" in sys.argv else 10**9
WORDS = [f"word{i}" for i in range(500)]
VOCAB = {w: i for i, w in enumerate(WORDS)}


class Lines(Dataset):
    def __init__(self, n=2048):
        g = torch.Generator().manual_seed(0)
        self.lines = [", ".join(WORDS[i] for i in torch.randint(0, 500, (128,), generator=g)) for _ in range(n)]
        self.ready = [self.tokenise(line) for line in self.lines] if FIXED else None

    def tokenise(self, line):
        ids = []
        for token in re.split(r"\W+", line):
            token = token.lower().strip()
            ids.append(VOCAB.get(token, 0))
        return torch.tensor(ids)

    def __getitem__(self, i):
        return self.ready[i] if FIXED else self.tokenise(self.lines[i])

    def __len__(self):
        return len(self.lines)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.emb, self.rnn, self.out = nn.Embedding(500, 32), nn.GRU(32, 32, batch_first=True), nn.Linear(32, 500)

    def forward(self, x):
        return self.out(self.rnn(self.emb(x))[0])


model = Model()
optim = torch.optim.Adam(model.parameters(), fused=True)
done = 0
while done < STEPS:
    for batch in DataLoader(Lines(), batch_size=32, shuffle=True):
        loss = nn.functional.cross_entropy(model(batch[:, :-1]).transpose(1, 2), batch[:, 1:])
        optim.zero_grad()
        loss.backward()
        optim.step()
        done += 1
        if done >= STEPS:
            break
