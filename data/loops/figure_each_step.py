"""Draws the loss curve after every step."""

import sys
import tempfile

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import torch
from torch import nn, optim

fixed = "--fixed" in sys.argv
steps = int(sys.argv[sys.argv.index("--steps") + 1]) if "--steps" in sys.argv else 10**9
folder = tempfile.mkdtemp()


def plot(losses):
    fig, ax = plt.subplots()
    ax.plot(losses[-200:])
    ax.set_ylabel("loss")
    fig.savefig(folder + "/loss.png")
    plt.close(fig)


net = nn.Sequential(nn.Linear(256, 512), nn.ReLU(), nn.Linear(512, 10))
opt = optim.SGD(net.parameters(), lr=0.01, momentum=0.9, fused=True)
history = []
for i in range(steps):
    inputs, labels = torch.randn(256, 256), torch.randint(0, 10, (256,))
    opt.zero_grad()
    loss = nn.functional.cross_entropy(net(inputs), labels)
    loss.backward()
    opt.step()
    history.append(loss.item())
    if not fixed or i % 500 == 499:
        plot(history)
