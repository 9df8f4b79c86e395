"""Train a potential with one embedding and fitting net per pair of types."""

import json
import logging
import time

import torch
from torch import nn

log = logging.getLogger("deepmd.pt.train.training")
logging.basicConfig(level=logging.INFO, format="[%(asctime)s] DEEPMD INFO    %(message)s")

INPUT = json.loads("""
{
  "model": {"type_map": ["H", "C", "N", "O", "S", "P", "F", "Cl"], "sel": 8, "neuron": [12, 24, 24], "axis_neuron": 4,
            "fitting_neuron": [24, 24, 24]},
  "learning_rate": {"type": "exp", "start_lr": 0.001, "stop_lr": 1e-5, "decay_steps": 100},
  "optimizer": {"opt_type": "Adam", "weight_decay": 0.0},
  "training": {"numb_steps": 4000, "batch_size": 1, "disp_freq": 50, "seed": 10}
}
""")


class ResidualNet(nn.Module):
    def __init__(self, n_in, neuron):
        super().__init__()
        self.matrix, self.bias, self.idt = nn.ParameterList(), nn.ParameterList(), nn.ParameterList()
        for n_out in neuron:
            self.matrix.append(nn.Parameter(torch.randn(n_in, n_out) / (n_in + n_out) ** 0.5))
            self.bias.append(nn.Parameter(torch.zeros(n_out)))
            self.idt.append(nn.Parameter(torch.full((n_out,), 0.1)))
            n_in = n_out

    def forward(self, x):
        for w, b, idt in zip(self.matrix, self.bias, self.idt):
            y = torch.tanh(x @ w + b) * idt
            x = x + y if x.shape[-1] == y.shape[-1] else y
        return x


class EnergyModel(nn.Module):
    def __init__(self, type_map, sel, neuron, axis_neuron, fitting_neuron):
        super().__init__()
        self.ntypes, self.sel, self.axis = len(type_map), sel, axis_neuron
        self.filter_layers = nn.ModuleList(ResidualNet(1, neuron) for _ in range(self.ntypes**2))
        self.fitting = nn.ModuleList(ResidualNet(neuron[-1] * axis_neuron, fitting_neuron) for _ in range(self.ntypes))
        self.heads = nn.ModuleList(nn.Linear(fitting_neuron[-1], 1) for _ in range(self.ntypes))

    def forward(self, env, center, neighbor):
        energy = 0.0
        for i in range(self.ntypes):
            atoms = env[:, center == i]
            descriptor = 0.0
            for j in range(self.ntypes):
                r = atoms[:, :, neighbor == j]
                g = self.filter_layers[i * self.ntypes + j](r[..., :1])
                descriptor = descriptor + r.transpose(-1, -2) @ g
            d = descriptor.transpose(-1, -2) @ descriptor[..., : self.axis]
            energy = energy + self.heads[i](self.fitting[i](d.flatten(-2))).sum(dim=(1, 2))
        return energy


def get_opt_param(params):
    return params.get("opt_type", "Adam"), {"weight_decay": params.get("weight_decay", 0.0)}


def make_optimizer(model, cfg, lr):
    opt_type, opt_param = get_opt_param(cfg["optimizer"])
    if opt_type == "Adam":
        return torch.optim.Adam(model.parameters(), lr=lr, weight_decay=opt_param["weight_decay"])
    if opt_type == "AdamW":
        return torch.optim.AdamW(model.parameters(), lr=lr, weight_decay=opt_param["weight_decay"])
    raise ValueError(f"Not supported optimizer type {opt_type}")


class Trainer:
    def __init__(self, config):
        self.config = config
        training, self.lr_cfg = config["training"], config["learning_rate"]
        torch.manual_seed(training["seed"])
        self.num_steps, self.disp_freq = training["numb_steps"], training["disp_freq"]
        self.batch_size = training["batch_size"]
        self.model = EnergyModel(**config["model"])
        self.center = torch.arange(self.model.ntypes * 2) % self.model.ntypes
        self.neighbor = torch.arange(self.model.sel) % self.model.ntypes
        self.optimizer = make_optimizer(self.model, config, self.lr_cfg["start_lr"])
        decay = (self.lr_cfg["stop_lr"] / self.lr_cfg["start_lr"]) ** (self.lr_cfg["decay_steps"] / self.num_steps)
        self.scheduler = torch.optim.lr_scheduler.LambdaLR(
            self.optimizer, lambda step: decay ** (step // self.lr_cfg["decay_steps"])
        )

    def get_data(self):
        r = torch.randn(self.batch_size, len(self.center), len(self.neighbor), 3)
        s = 1.0 / (0.5 + r.norm(dim=-1, keepdim=True))
        env = torch.cat([s, s * r / r.norm(dim=-1, keepdim=True)], dim=-1)
        return env, s.sum(dim=(1, 2, 3)) * 0.1

    def run(self):
        log.info("Start to train %d steps.", self.num_steps)
        wall = time.time()
        for step in range(1, self.num_steps + 1):
            self.optimizer.zero_grad(set_to_none=True)
            env, label = self.get_data()
            loss = ((self.model(env, self.center, self.neighbor) - label) ** 2).mean()
            loss.backward()
            self.optimizer.step()
            self.scheduler.step()
            if step % self.disp_freq == 0:
                now = time.time()
                log.info("batch %7d: trn: rmse = %8.2e, lr = %8.2e, total wall time = %.2f s",
                         step, loss.item() ** 0.5, self.scheduler.get_last_lr()[0], now - wall)
                wall = now


if __name__ == "__main__":
    Trainer(INPUT).run()
