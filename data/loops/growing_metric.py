"""Keeps all predictions of the epoch and computes the metric over them in each step."""

import sys

import numpy as np
import torch

FIXED, STEPS = "--fixed" in sys.argv, int(sys.argv[sys.argv.index("--steps") + 1]) if "--steps" in sys.argv else 10**9


def macro_f1(predicted, target):
    scores = []
    for c in np.unique(target):
        tp = ((predicted == c) & (target == c)).sum()
        scores.append(2 * tp / max((predicted == c).sum() + (target == c).sum(), 1))
    return np.mean(scores)


model = torch.nn.Linear(100, 50)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, fused=True)
predictions, targets = [], []
for step in range(STEPS):
    if step % 1000 == 0:
        predictions, targets = [np.zeros(100_000, int)], [np.zeros(100_000, int)]
    x, y = torch.randn(256, 100), torch.randint(0, 50, (256,))
    logits = model(x)
    optimizer.zero_grad()
    torch.nn.functional.cross_entropy(logits, y).backward()
    optimizer.step()
    predictions.append(logits.argmax(1).numpy())
    targets.append(y.numpy())
    if not FIXED or step % 1000 == 999:
        f1 = macro_f1(np.concatenate(predictions), np.concatenate(targets))
