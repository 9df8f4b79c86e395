# Offline double DQN with prioritized replay on logged warehouse-routing data,
# followed by on-line fine tuning in the simulator. Single file on purpose.
import random
import time
from collections import namedtuple

import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F

SEED = 3
OBS_DIM, N_ACTIONS = 64, 12
CAPACITY = 250_000
LOGGED = 200_000
BATCH = 256
GAMMA = 0.985
TOTAL_UPDATES = 20_000
ENV_STEPS_PER_UPDATE = 2
TARGET_SYNC = 500
LR = 2.5e-4

Transition = namedtuple("Transition", "obs action reward next_obs done")


class RoutingSim:
    """Linear dynamics with a goal vector; cheap but not trivial."""

    def __init__(self, rng):
        self.rng = rng
        self.A = (0.95 * np.linalg.qr(rng.standard_normal((OBS_DIM, OBS_DIM)))[0]).astype(np.float32)
        self.B = rng.standard_normal((N_ACTIONS, OBS_DIM)).astype(np.float32) * 0.3
        self.goal = rng.standard_normal(OBS_DIM).astype(np.float32)

    def reset(self):
        self.t = 0
        self.x = self.rng.standard_normal(OBS_DIM).astype(np.float32)
        return self.x

    def step(self, a):
        self.t += 1
        self.x = self.x @ self.A + self.B[a]
        reward = -float(np.abs(self.x - self.goal).mean())
        return self.x, reward, self.t >= 200


class PrioritizedReplay:
    def __init__(self, capacity, alpha=0.6, beta=0.4):
        self.capacity, self.alpha, self.beta = capacity, alpha, beta
        self.storage, self.priorities = [], []
        self.cursor = 0

    def __len__(self):
        return len(self.storage)

    def add(self, transition, priority=None):
        if priority is None:
            priority = 1.0
        if len(self.storage) < self.capacity:
            self.storage.append(transition)
            self.priorities.append(priority)
        else:
            self.storage[self.cursor] = transition
            self.priorities[self.cursor] = priority
        self.cursor = (self.cursor + 1) % self.capacity

    def sample(self, batch_size):
        scaled = np.array([p ** self.alpha for p in self.priorities])
        probs = scaled / scaled.sum()
        idx = np.random.choice(len(self.storage), batch_size, p=probs)
        weights = (len(self.storage) * probs[idx]) ** (-self.beta)
        weights /= weights.max()
        batch = Transition(*zip(*[self.storage[i] for i in idx]))
        return (
            idx,
            torch.from_numpy(np.stack(batch.obs)),
            torch.tensor(batch.action),
            torch.tensor(batch.reward),
            torch.from_numpy(np.stack(batch.next_obs)),
            torch.tensor(batch.done, dtype=torch.float32),
            torch.from_numpy(weights.astype(np.float32)),
        )

    def update(self, idx, errors):
        for i, e in zip(idx, errors):
            self.priorities[i] = e + 1e-4


class DuelingQ(nn.Module):
    def __init__(self, hidden=448):
        super().__init__()
        self.trunk = nn.Sequential(nn.Linear(OBS_DIM, hidden), nn.ReLU(), nn.Linear(hidden, hidden), nn.ReLU(),
                                   nn.Linear(hidden, hidden), nn.ReLU())
        self.value = nn.Linear(hidden, 1)
        self.advantage = nn.Linear(hidden, N_ACTIONS)

    def forward(self, x):
        h = self.trunk(x)
        adv = self.advantage(h)
        return self.value(h) + adv - adv.mean(1, keepdim=True)


def load_log(env, n, rng):
    x = rng.standard_normal((n, OBS_DIM)).astype(np.float32)
    a = rng.integers(0, N_ACTIONS, n)
    nx = x @ env.A + env.B[a]
    r = -np.abs(nx - env.goal).mean(1)
    return [Transition(*row, False) for row in zip(x, a.tolist(), r.tolist(), nx)]


if __name__ == "__main__":
    random.seed(SEED)
    np.random.seed(SEED)
    torch.manual_seed(SEED)
    rng = np.random.default_rng(SEED)
    env = RoutingSim(rng)
    replay = PrioritizedReplay(CAPACITY)
    for tr in load_log(env, LOGGED, rng):
        replay.add(tr)

    q, target = DuelingQ(), DuelingQ()
    target.load_state_dict(q.state_dict())
    optimizer = torch.optim.Adam(q.parameters(), lr=LR, fused=True)

    obs, ep_return, returns, tic = env.reset(), 0.0, [], time.time()
    for update in range(TOTAL_UPDATES):
        eps = max(0.05, 0.5 - update / 5000)
        for _ in range(ENV_STEPS_PER_UPDATE):
            if random.random() < eps:
                action = random.randrange(N_ACTIONS)
            else:
                with torch.no_grad():
                    action = int(q(torch.from_numpy(obs)[None]).argmax())
            nxt, reward, done = env.step(action)
            replay.add(Transition(obs, action, reward, nxt, done))
            ep_return += reward
            obs = nxt
            if done:
                returns.append(ep_return)
                obs, ep_return = env.reset(), 0.0

        idx, s, a, r, s2, d, w = replay.sample(BATCH)
        with torch.no_grad():
            best = q(s2).argmax(1, keepdim=True)
            y = r + GAMMA * (1 - d) * target(s2).gather(1, best).squeeze(1)
        pred = q(s).gather(1, a[:, None]).squeeze(1)
        loss = (w * F.smooth_l1_loss(pred, y, reduction="none")).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        replay.update(idx.tolist(), (pred.detach() - y).abs().tolist())

        if update % TARGET_SYNC == 0:
            target.load_state_dict(q.state_dict())
        if update % 200 == 199:
            mean_ret = np.mean(returns[-20:]) if returns else float("nan")
            print(f"{update + 1:6d} loss={loss.item():.4f} return={mean_ret:.1f} "
                  f"ups={200 / (time.time() - tic):.1f}", flush=True)
            tic = time.time()
