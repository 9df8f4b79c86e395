"""A policy learns from a simulation that steps one environment after another."""

import argparse
import math

import numpy as np
import torch
from torch import nn

parser = argparse.ArgumentParser()
parser.add_argument("--fixed", action="store_true")
parser.add_argument("--steps", type=int, default=10**9)
args = parser.parse_args()
ENVS, HORIZON = 64, 16


def simulate(state, action):
    if args.fixed:
        force = np.where(action == 1, 10.0, -10.0)
        acceleration = (force + 0.05 * state[:, 3] ** 2 * np.sin(state[:, 2])) / 1.1
        return state + 0.02 * np.stack([state[:, 1], acceleration, state[:, 3], np.sin(state[:, 2])], 1)
    out = []
    for s, a in zip(state, action):
        force = 10.0 if a == 1 else -10.0
        acceleration = (force + 0.05 * s[3] ** 2 * math.sin(s[2])) / 1.1
        out.append([s[0] + 0.02 * s[1], s[1] + 0.02 * acceleration, s[2] + 0.02 * s[3], s[3] + 0.02 * math.sin(s[2])])
    return np.array(out)


agent = nn.Sequential(nn.Linear(4, 64), nn.Tanh(), nn.Linear(64, 2))
optimizer = torch.optim.Adam(agent.parameters(), lr=2.5e-4, fused=True)
state = np.zeros((ENVS, 4))
for update in range(args.steps):
    log_probs, rewards = [], []
    for _ in range(HORIZON):
        dist = torch.distributions.Categorical(logits=agent(torch.as_tensor(state, dtype=torch.float32)))
        action = dist.sample()
        state = np.clip(simulate(state, action.numpy()), -3, 3)
        log_probs.append(dist.log_prob(action))
        rewards.append(torch.as_tensor(1 - np.abs(state[:, 2]), dtype=torch.float32))
    loss = -(torch.stack(log_probs) * torch.stack(rewards)).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
