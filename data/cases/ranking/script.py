import sys
import torch
from torch import nn
steps = int(sys.argv[sys.argv.index('--steps') + 1]) if '--steps' in sys.argv else 10 ** 9


class PairwiseLoss(nn.Module):

    def forward(self, scores, relevance):
        losses = []
        for i in range(len(scores)):
            for j in range(len(scores)):
                if relevance[i] > relevance[j]:
                    losses.append(torch.relu(1 - (scores[i] - scores[j])))
        return torch.stack(losses).mean()


ranker, criterion = (nn.Sequential(nn.Linear(40, 64), nn.ReLU(), nn.Linear(64, 1)), PairwiseLoss())
optimizer = torch.optim.Adam(ranker.parameters(), fused=True)
for _ in range(steps):
    documents, relevance = (torch.randn(24, 40), torch.arange(24).roll(5))
    loss = criterion(ranker(documents).squeeze(1), relevance)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
