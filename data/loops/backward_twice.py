"""Two losses of one network, a backward pass for each."""

import sys

import torch
from torch import nn

fixed = "--fixed" in sys.argv
steps = int(sys.argv[sys.argv.index("--steps") + 1]) if "--steps" in sys.argv else 10**9
trunk = nn.Sequential(nn.Linear(256, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU())
policy, value = nn.Linear(512, 6), nn.Linear(512, 1)
optimizer = torch.optim.Adam([*trunk.parameters(), *policy.parameters(), *value.parameters()], fused=True)
for _ in range(steps):
    x, action, target = torch.randn(256, 256), torch.randint(0, 6, (256,)), torch.randn(256, 1)
    features = trunk(x)
    policy_loss = nn.functional.cross_entropy(policy(features), action)
    value_loss = nn.functional.mse_loss(value(features), target)
    optimizer.zero_grad()
    if fixed:
        (policy_loss + value_loss).backward()
    else:
        policy_loss.backward(retain_graph=True)
        value_loss.backward()
    optimizer.step()
