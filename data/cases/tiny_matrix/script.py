import json
import sys

import torch
from torch import nn

steps = int(sys.argv[1])
torch.set_num_threads(1)
torch.manual_seed(0)
data, labels = torch.randn(1024, 32), torch.randint(0, 4, (1024,))
held_out, their_labels = torch.randn(128, 32), torch.randint(0, 4, (128,))
model = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 4))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
matrix = torch.zeros(4, 4, dtype=torch.long)
for step in range(steps):
    pick = torch.randint(0, 1024, (512,))
    x, y = data[pick], labels[pick]
    logits = model(x)
    loss = nn.functional.cross_entropy(logits, y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    for t, p in zip(y, logits.argmax(1)):
        matrix[t.item(), p.item()] += 1
    if step % 10 == 9:
        with torch.no_grad():
            val = nn.functional.cross_entropy(model(held_out), their_labels)
        print(f"step {step}: val loss {val:.6f}")
with open("matrix.json", "w") as file:
    json.dump(matrix.tolist(), file)
