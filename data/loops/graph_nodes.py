"""A graph network that sums the messages of each node in Python."""

import sys

import torch
import torch.nn as nn

FIXED = "--fixed" in sys.argv
STEPS = int(sys.argv[sys.argv.index("--steps") + 1]) if "--steps" in sys.argv else 10**9


class GraphConv(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.lin = nn.Linear(width, width)

    def forward(self, x, edges):
        h = self.lin(x)
        if FIXED:
            return torch.zeros_like(h).index_add(0, edges[1], h[edges[0]]).relu()
        out = []
        for node in range(len(x)):
            sources = edges[0][edges[1] == node]
            out.append(h[sources].sum(0))
        return torch.stack(out).relu()


torch.manual_seed(0)
x, edges, y = torch.randn(500, 32), torch.randint(0, 500, (2, 4000)), torch.randint(0, 7, (500,))
convs, head = nn.ModuleList([GraphConv(32), GraphConv(32)]), nn.Linear(32, 7)
opt = torch.optim.Adam([*convs.parameters(), *head.parameters()], lr=0.01, fused=True)
for epoch in range(STEPS):
    opt.zero_grad()
    h = x
    for conv in convs:
        h = conv(h, edges)
    nn.functional.cross_entropy(head(h), y).backward()
    opt.step()
