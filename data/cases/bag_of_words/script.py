import sys
import torch
import torch.nn.functional as F
from torch import nn
STEPS = int(sys.argv[sys.argv.index('--steps') + 1]) if '--steps' in sys.argv else 10 ** 9
VOCABULARY, WIDTH = (8000, 64)
table = nn.Parameter(torch.randn(VOCABULARY, WIDTH) * 0.02)
head = nn.Linear(WIDTH, 10)
optimizer = torch.optim.SGD([table, *head.parameters()], lr=0.1, fused=True)
for _ in range(STEPS):
    ids, labels = (torch.randint(0, VOCABULARY, (32, 64)), torch.randint(0, 10, (32,)))
    words = F.one_hot(ids, VOCABULARY).float() @ table
    loss = F.cross_entropy(head(words.mean(1)), labels)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
