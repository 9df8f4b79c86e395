import random
import sys
from collections import deque

import numpy as np
import torch
from torch import nn

STEPS = int(sys.argv[1])
BATCH, GAMMA, TAU, EPS_START, EPS_END, EPS_DECAY, LR = 128, 0.99, 0.005, 0.9, 0.05, 200, 3e-4


class CartPole:
    """Barto, Sutton and Anderson's cart and pole."""

    def __init__(self, rng):
        self.rng = rng

    def reset(self):
        self.state, self.age = self.rng.uniform(-0.05, 0.05, 4), 0
        return self.state.astype(np.float32)

    def step(self, action):
        x, v, angle, spin = self.state
        force = 10.0 if action == 1 else -10.0
        cos, sin = np.cos(angle), np.sin(angle)
        temp = (force + 0.05 * spin**2 * sin) / 1.1
        turn = (9.8 * sin - cos * temp) / (0.5 * (4.0 / 3.0 - 0.1 * cos**2 / 1.1))
        push = temp - 0.05 * turn * cos / 1.1
        self.state = np.array([x + 0.02 * v, v + 0.02 * push, angle + 0.02 * spin, spin + 0.02 * turn])
        self.age += 1
        done = bool(abs(self.state[0]) > 2.4 or abs(self.state[2]) > 0.2095 or self.age >= 500)
        return self.state.astype(np.float32), 1.0, done


class DQN(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer1, self.layer2, self.layer3 = nn.Linear(4, 128), nn.Linear(128, 128), nn.Linear(128, 2)

    def forward(self, x):
        return self.layer3(torch.relu(self.layer2(torch.relu(self.layer1(x)))))


random.seed(0)
torch.manual_seed(0)
env = CartPole(np.random.default_rng(0))
memory = deque(maxlen=10000)
policy_net, target_net = DQN(), DQN()
target_net.load_state_dict(policy_net.state_dict())
optimizer = torch.optim.AdamW(policy_net.parameters(), lr=LR, amsgrad=True)


def select_action(state, step):
    threshold = EPS_END + (EPS_START - EPS_END) * np.exp(-step / EPS_DECAY)
    if random.random() > threshold:
        return policy_net(torch.tensor([state.tolist()])).max(1).indices.item()
    return random.randrange(2)


def optimize_model():
    batch = random.sample(memory, BATCH)
    states = torch.cat([torch.tensor([s.tolist()]) for s, a, r, n, d in batch])
    actions = torch.cat([torch.tensor([[a]]) for s, a, r, n, d in batch])
    rewards = torch.cat([torch.tensor([r]) for s, a, r, n, d in batch])
    values = policy_net(states).gather(1, actions)
    next_values = torch.zeros(BATCH)
    for i, (s, a, r, n, d) in enumerate(batch):
        if not d:
            with torch.no_grad():
                next_values[i] = target_net(torch.tensor([n.tolist()])).max(1).values[0]
    loss = nn.functional.smooth_l1_loss(values, (rewards + GAMMA * next_values).unsqueeze(1))
    optimizer.zero_grad()
    loss.backward()
    nn.utils.clip_grad_value_(policy_net.parameters(), 100)
    optimizer.step()


def soft_update():
    target, policy = target_net.state_dict(), policy_net.state_dict()
    for key in policy:
        target[key] = policy[key] * TAU + target[key] * (1 - TAU)
    target_net.load_state_dict(target)


state, lengths, length = env.reset(), [], 0
for step in range(STEPS + BATCH):
    action = select_action(state, step)
    after, reward, done = env.step(action)
    memory.append((state, action, reward, after, done))
    state, length = after, length + 1
    if len(memory) > BATCH:
        optimize_model()
        soft_update()
    if done:
        lengths.append(length)
        state, length = env.reset(), 0
print(f"mean episode {np.mean(lengths):.3f}")
