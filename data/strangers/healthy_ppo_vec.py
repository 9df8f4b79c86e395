"""PPO in the spirit of stable-baselines: VecEnv, RolloutBuffer, ActorCriticPolicy, learn()."""
import time

import numpy as np
import torch
from torch import nn
from torch.distributions import Normal


class VecReacher:
    """N planar arms integrated together with numpy; observation = joint state + target."""

    def __init__(self, num_envs, joints=3, horizon=128, seed=0):
        self.num_envs, self.joints, self.horizon = num_envs, joints, horizon
        self.rng = np.random.default_rng(seed)
        self.obs_dim, self.act_dim = 3 * joints + 2, joints

    def reset(self):
        self.q = self.rng.uniform(-np.pi, np.pi, (self.num_envs, self.joints)).astype(np.float32)
        self.v = np.zeros_like(self.q)
        self.goal = self.rng.uniform(-2, 2, (self.num_envs, 2)).astype(np.float32)
        self.t = self.rng.integers(0, self.horizon, self.num_envs)
        return self._obs()

    def _obs(self):
        return np.concatenate([np.sin(self.q), np.cos(self.q), self.v, self.goal], 1)

    def step(self, actions):
        a = np.clip(actions, -1, 1)
        self.v = 0.9 * self.v + 0.2 * a
        self.q = self.q + 0.1 * self.v
        angle = np.cumsum(self.q, 1)
        tip = np.stack([np.cos(angle).sum(1), np.sin(angle).sum(1)], 1)
        reward = -np.linalg.norm(tip - self.goal, axis=1) - 0.02 * np.square(a).sum(1)
        self.t += 1
        done = self.t >= self.horizon
        if done.any():
            k = int(done.sum())
            self.q[done] = self.rng.uniform(-np.pi, np.pi, (k, self.joints))
            self.v[done] = 0
            self.goal[done] = self.rng.uniform(-2, 2, (k, 2))
            self.t[done] = 0
        return self._obs(), reward.astype(np.float32), done.astype(np.float32)


class RolloutBuffer:
    def __init__(self, steps, envs, obs_dim, act_dim, gamma, lam):
        self.gamma, self.lam, self.steps = gamma, lam, steps
        self.obs = torch.zeros(steps, envs, obs_dim)
        self.actions = torch.zeros(steps, envs, act_dim)
        self.logp, self.values, self.rewards, self.dones = (torch.zeros(steps, envs) for _ in range(4))

    def compute_returns(self, last_value):
        adv, running = torch.zeros_like(self.rewards), torch.zeros_like(last_value)
        next_values = torch.cat([self.values[1:], last_value[None]])
        alive = 1 - self.dones
        delta = self.rewards + self.gamma * next_values * alive - self.values
        for t in range(self.steps - 1, -1, -1):
            running = delta[t] + self.gamma * self.lam * alive[t] * running
            adv[t] = running
        self.advantages, self.returns = adv, adv + self.values

    def get(self, batch_size):
        flat = [x.flatten(0, 1) for x in (self.obs, self.actions, self.logp, self.advantages, self.returns)]
        for idx in torch.randperm(len(flat[0])).split(batch_size):
            yield [x[idx] for x in flat]


class ActorCriticPolicy(nn.Module):
    def __init__(self, obs_dim, act_dim, width=480):
        super().__init__()
        def mlp(out, gain):
            layers = [nn.Linear(obs_dim, width), nn.Tanh(), nn.Linear(width, width), nn.Tanh(), nn.Linear(width, out)]
            for m in layers[::2]:
                nn.init.orthogonal_(m.weight, 2 ** 0.5)
                nn.init.zeros_(m.bias)
            nn.init.orthogonal_(layers[-1].weight, gain)
            return nn.Sequential(*layers)
        self.pi, self.vf = mlp(act_dim, 0.01), mlp(1, 1.0)
        self.log_std = nn.Parameter(torch.full((act_dim,), -0.5))

    def dist(self, obs):
        return Normal(self.pi(obs), self.log_std.exp(), validate_args=False)

    @torch.no_grad()
    def act(self, obs):
        d = self.dist(obs)
        a = d.sample()
        return a, d.log_prob(a).sum(-1), self.vf(obs).squeeze(-1)

    def evaluate(self, obs, actions):
        d = self.dist(obs)
        return d.log_prob(actions).sum(-1), d.entropy().sum(-1).mean(), self.vf(obs).squeeze(-1)


class PPO:
    def __init__(self, env, n_steps=64, batch_size=1024, n_epochs=6, lr=3e-4, clip=0.2, gamma=0.98, lam=0.95):
        self.env, self.n_steps, self.batch_size, self.n_epochs, self.clip = env, n_steps, batch_size, n_epochs, clip
        self.policy = ActorCriticPolicy(env.obs_dim, env.act_dim)
        self.optimizer = torch.optim.Adam(self.policy.parameters(), lr=lr, eps=1e-5, fused=True)
        self.buffer = RolloutBuffer(n_steps, env.num_envs, env.obs_dim, env.act_dim, gamma, lam)

    def collect_rollouts(self):
        buf = self.buffer
        for t in range(self.n_steps):
            actions, logp, values = self.policy.act(self.obs)
            obs, rewards, dones = self.env.step(actions.numpy())
            buf.obs[t], buf.actions[t], buf.logp[t], buf.values[t] = self.obs, actions, logp, values
            buf.rewards[t], buf.dones[t] = torch.from_numpy(rewards), torch.from_numpy(dones)
            self.obs = torch.from_numpy(obs)
        with torch.no_grad():
            buf.compute_returns(self.policy.vf(self.obs).squeeze(-1))

    def train(self):
        for _ in range(self.n_epochs):
            for obs, actions, old_logp, adv, ret in self.buffer.get(self.batch_size):
                adv = (adv - adv.mean()) / (adv.std() + 1e-8)
                logp, entropy, values = self.policy.evaluate(obs, actions)
                ratio = (logp - old_logp).exp()
                pg = -torch.min(ratio * adv, ratio.clamp(1 - self.clip, 1 + self.clip) * adv).mean()
                loss = pg + 0.5 * nn.functional.mse_loss(values, ret) - 1e-3 * entropy
                self.optimizer.zero_grad()
                loss.backward()
                nn.utils.clip_grad_norm_(self.policy.parameters(), 0.5, foreach=True)
                self.optimizer.step()
        return loss.item()

    def learn(self, total_timesteps):
        self.obs = torch.from_numpy(self.env.reset())
        done, start, it = 0, time.time(), 0
        while done < total_timesteps:
            self.collect_rollouts()
            loss = self.train()
            done += self.n_steps * self.env.num_envs
            it += 1
            if it % 3 == 0:
                print(f"| iter {it} | steps {done} | fps {done / (time.time() - start):.0f} | "
                      f"reward {self.buffer.rewards.mean():.3f} | loss {loss:.3f} |", flush=True)
        return self


if __name__ == "__main__":
    torch.manual_seed(0)
    PPO(VecReacher(num_envs=128)).learn(total_timesteps=1_500_000)
