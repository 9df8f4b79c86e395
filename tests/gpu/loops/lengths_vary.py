"""Texts of growing and shrinking lengths: the caching allocator holds blocks of sizes that never come again."""

import sys

import torch
import torch.nn.functional as F
from torch import nn

fixed, cuda = "--fixed" in sys.argv, "--device" not in sys.argv
steps = int(sys.argv[sys.argv.index("--steps") + 1]) if "--steps" in sys.argv else 200
width, longest = (1024, 4096) if cuda else (16, 64)
device = torch.device("cuda" if cuda else "cpu")
if cuda:  # of a card that others use, too: what is cached beyond this is returned and reserved again
    torch.cuda.set_per_process_memory_fraction(6e9 / torch.cuda.get_device_properties(0).total_memory)

torch.manual_seed(0)
embed, body = nn.Embedding(1000, width).to(device), nn.Linear(width, width).to(device)
gate, head = nn.Linear(width, 4 * width).to(device), nn.Linear(4 * width, 1000).to(device)
params = [p for m in (embed, body, gate, head) for p in m.parameters()]
optimizer = torch.optim.SGD(params, lr=0.1, fused=True)
lengths = torch.randint(longest // 4, longest, (steps,)).tolist()
for length in lengths:
    ids = torch.randint(0, 1000, (8, length), device=device)
    if fixed:
        ids = F.pad(ids, (0, -length % (longest // 4)))
    hidden = F.gelu(gate(F.gelu(body(embed(ids)))))
    loss = F.cross_entropy(head(hidden)[:, :length].flatten(0, 1), ids[:, :length].flatten())
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
