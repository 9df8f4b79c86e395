import sys

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

USERS, ITEMS, WIDTH, NEGATIVES, EPOCHS = 2000, 60000, 32, 4, int(sys.argv[1])


class Interactions(Dataset):
    def __init__(self, count, rng):
        self.users = rng.integers(0, USERS, count)
        self.items = (ITEMS * rng.power(0.3, count)).astype(int) % ITEMS
        self.seen = list(zip(self.users.tolist(), self.items.tolist()))
        self.rng = np.random.default_rng(7)

    def __len__(self):
        return len(self.users)

    def __getitem__(self, index):
        negatives = []
        while len(negatives) < NEGATIVES:
            item = int(self.rng.integers(0, ITEMS))
            if (int(self.users[index]), item) not in self.seen:
                negatives.append(item)
        return int(self.users[index]), int(self.items[index]), torch.tensor(negatives)


class TwoTowers(nn.Module):
    def __init__(self):
        super().__init__()
        self.user, self.item = nn.Embedding(USERS, WIDTH), nn.Embedding(ITEMS, WIDTH)
        nn.init.normal_(self.user.weight, std=0.1)
        nn.init.normal_(self.item.weight, std=0.1)

    def forward(self, users, items):
        return (self.user(users)[:, None] * self.item(items)).sum(-1)


def train_epoch(model, loader, optimizer):
    losses = []
    for users, positives, negatives in loader:
        scores = model(users, torch.cat([positives[:, None], negatives], 1))
        loss = -nn.functional.logsigmoid(scores[:, :1] - scores[:, 1:]).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss)
    return torch.stack(losses).mean().item()


def recall_at(model, pairs, k=20):
    hits = 0
    with torch.no_grad():
        for user, item in pairs:
            scores = model.user.weight[user] @ model.item.weight.t()
            hits += int(item in scores.sort(descending=True).indices[:k].tolist())
    return hits / len(pairs)


def main():
    torch.manual_seed(0)
    data = Interactions(6000, np.random.default_rng(0))
    loader = DataLoader(data, batch_size=256, shuffle=True)
    model = TwoTowers()
    optimizer = torch.optim.SGD(model.parameters(), lr=5.0)
    held_out = data.seen[:20]
    for epoch in range(EPOCHS):
        loss = train_epoch(model, loader, optimizer)
        print(f"epoch {epoch}: loss {loss:.5f}, recall@20 {recall_at(model, held_out):.3f}")


if __name__ == "__main__":
    main()
