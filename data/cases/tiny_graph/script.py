import sys

import torch
from torch import nn

steps = int(sys.argv[1])


class Conv(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.lin = nn.Linear(width, width)

    def forward(self, x, edges):
        h = self.lin(x)
        out = []
        for node in range(len(x)):
            out.append(h[edges[0][edges[1] == node]].sum(0))
        return torch.stack(out).relu()


torch.set_num_threads(1)
torch.manual_seed(0)
x, edges, y = torch.randn(80, 16), torch.randint(0, 80, (2, 400)), torch.randint(0, 7, (80,))
convs, head = nn.ModuleList([Conv(16), Conv(16)]), nn.Linear(16, 7)
optimizer = torch.optim.Adam([*convs.parameters(), *head.parameters()], lr=0.01)
for epoch in range(steps):
    optimizer.zero_grad()
    h = x
    for conv in convs:
        h = conv(h, edges)
    nn.functional.cross_entropy(head(h), y).backward()
    optimizer.step()
