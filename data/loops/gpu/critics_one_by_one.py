"""Reinforcement learning with an ensemble of critics, from a replay buffer on the device."""

import argparse

import torch
from torch import nn

OBSERVED, ACTIONS = 24, 6


class Stacked(nn.Module):
    """All critics as one: the weights of a layer in one tensor."""

    def __init__(self, critics):
        super().__init__()
        layers = [[layer for layer in critic if isinstance(layer, nn.Linear)] for critic in critics]
        self.weights = nn.ParameterList(torch.stack([one.weight.detach().T for one in each]) for each in zip(*layers))
        self.biases = nn.ParameterList(torch.stack([one.bias.detach()[None] for one in each]) for each in zip(*layers))

    def forward(self, x):
        x = x.expand(len(self.weights[0]), *x.shape)
        for layer, (weight, bias) in enumerate(zip(self.weights, self.biases)):
            x = torch.baddbmm(bias, torch.relu(x) if layer else x, weight)
        return x


class Ensemble(nn.Module):
    def __init__(self, count, width):
        super().__init__()
        inputs = OBSERVED + ACTIONS
        self.critics = nn.ModuleList(
            nn.Sequential(nn.Linear(inputs, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 1))
            for _ in range(count)
        )

    def forward(self, inputs):
        estimates = [critic(inputs) for critic in self.critics]
        return torch.stack(estimates)


class Agent:
    def __init__(self, config, device):
        count, width = (3, 8) if config.tiny else (10, 256)
        self.online, self.target = Ensemble(count, width), Ensemble(count, width)
        self.target.load_state_dict(self.online.state_dict())
        if config.fixed:
            self.online, self.target = Stacked(self.online.critics), Stacked(self.target.critics)
        self.online.to(device), self.target.to(device).requires_grad_(False)
        self.optimizer = torch.optim.Adam(self.online.parameters(), lr=3e-4, fused=True)

    def learn(self, inputs, reward, following):
        goal = reward + 0.99 * self.target(following).amin(0)
        loss = (self.online(inputs) - goal).square().mean(1).sum()
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        torch._foreach_lerp_(list(self.target.parameters()), list(self.online.parameters()), 0.005)
        return loss.detach()


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--fixed", action="store_true", help="all critics in one batched product")
    parser.add_argument("--steps", type=int, default=6000)
    parser.add_argument("--tiny", action="store_true", default=not torch.cuda.is_available())
    config = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.manual_seed(0)
    agent = Agent(config, device)
    batch, stored = (4, 64) if config.tiny else (256, 100_000)
    replay = torch.randn(stored, 2 * (OBSERVED + ACTIONS) + 1, device=device)
    for step in range(config.steps):
        rows = replay[torch.randint(stored, (batch,), device=device)]
        inputs, following, reward = rows.split([OBSERVED + ACTIONS, OBSERVED + ACTIONS, 1], dim=1)
        loss = agent.learn(inputs, reward, following)
        if step % 1000 == 999:
            print(f"{step + 1}: {loss.item():.4f}")
    print("loss", loss.item())


if __name__ == "__main__":
    main()
