"""Recipe: fine-tune a small causal language model, with per-step statistics for the run report."""

import gc
import itertools
import logging
import time
from dataclasses import dataclass

import torch
import torch.nn as nn
import torch.nn.functional as F

logging.basicConfig(level=logging.INFO, format="%(asctime)s | %(levelname)s | %(name)s | %(message)s")
logger = logging.getLogger("nemo_automodel.recipes.llm.train_ft")

CONFIG = {
    "step_scheduler": {"max_steps": 4000, "global_batch_size": 8, "ckpt_every_steps": 100000},
    "model": {"vocab_size": 512, "hidden_size": 64, "num_layers": 4, "seq_len": 32},
    "optimizer": {"lr": 1e-3, "betas": (0.9, 0.95), "weight_decay": 0.01},
    "planner": {"mesh": ["pp", "dp", "tp"]},
    "gc_every_steps": 20,
    "log_every_steps": 50,
}


class MixerBlock(nn.Module):
    def __init__(self, hidden_size):
        super().__init__()
        self.norm = nn.LayerNorm(hidden_size)
        self.mix = nn.Conv1d(hidden_size, hidden_size, 4, groups=hidden_size, padding=3)
        self.up = nn.Linear(hidden_size, 4 * hidden_size)
        self.down = nn.Linear(4 * hidden_size, hidden_size)

    def forward(self, x):
        h = self.mix(self.norm(x).transpose(1, 2))[..., : x.shape[1]].transpose(1, 2)
        return x + self.down(F.silu(self.up(h)))


class CausalLM(nn.Module):
    def __init__(self, vocab_size, hidden_size, num_layers, seq_len):
        super().__init__()
        self.embed_tokens = nn.Embedding(vocab_size, hidden_size)
        self.layers = nn.ModuleList(MixerBlock(hidden_size) for _ in range(num_layers))
        self.norm = nn.LayerNorm(hidden_size)
        self.lm_head = nn.Linear(hidden_size, vocab_size, bias=False)

    def forward(self, input_ids, labels):
        h = self.embed_tokens(input_ids)
        for layer in self.layers:
            h = layer(h)
        return F.cross_entropy(self.lm_head(self.norm(h)).flatten(0, 1), labels.flatten())


@dataclass
class OpSpec:
    placements: list
    redistribute: dict
    inputs: list


@dataclass
class OpStrategy:
    name: str
    specs: list
    chosen: OpSpec
    previous: object = None


class UpdatePlanner:
    """Plans how every parameter's update is laid out over the mesh."""

    def __init__(self, model, mesh):
        self.model, self.mesh = model, mesh
        self.history = []

    def plan(self, name, param, previous):
        numel, inputs = param.numel(), []
        specs = []
        for placements in itertools.product(("R", "S0", "S1"), repeat=len(self.mesh)):
            spec = OpSpec(list(placements), {axis: numel for axis, p in zip(self.mesh, placements) if p == "R"}, inputs)
            specs.append(spec)
            inputs = [spec]
        return OpStrategy(name, specs, min(specs, key=lambda spec: len(spec.redistribute)), previous)

    def step(self):
        plans, previous = {}, None
        for name, param in self.model.named_parameters():
            previous = plans[name] = self.plan(name, param, previous)
        self.history.append(plans)
        return plans


class TrainFinetuneRecipe:
    def __init__(self, cfg):
        self.cfg = cfg

    def setup(self):
        torch.manual_seed(1111)
        self.model = CausalLM(**self.cfg["model"])
        self.optimizer = torch.optim.AdamW(self.model.parameters(), **self.cfg["optimizer"])
        self.planner = UpdatePlanner(self.model, **self.cfg["planner"])
        self.data = torch.randint(0, self.cfg["model"]["vocab_size"], (20000,))

    def next_batch(self):
        seq_len, batch = self.cfg["model"]["seq_len"], self.cfg["step_scheduler"]["global_batch_size"]
        starts = torch.randint(0, len(self.data) - seq_len - 1, (batch,))
        window = self.data[starts[:, None] + torch.arange(seq_len + 1)]
        return {"input_ids": window[:, :-1], "labels": window[:, 1:]}

    def run_train_validation_loop(self):
        gc.collect()
        gc.freeze()
        gc.disable()
        start, tokens = time.perf_counter(), 0
        for step in range(1, self.cfg["step_scheduler"]["max_steps"] + 1):
            batch = self.next_batch()
            loss = self.model(**batch)
            loss.backward()
            nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
            plans = self.planner.step()
            self.optimizer.step()
            self.optimizer.zero_grad()
            if step % self.cfg["gc_every_steps"] == 0:
                gc.collect()
            tokens += batch["labels"].numel()
            if step % self.cfg["log_every_steps"] == 0:
                tps = tokens / (time.perf_counter() - start)
                logger.info("step %d | loss %.4f | plans %d | tps %.0f", step, loss.item(), len(plans), tps)


def main():
    recipe = TrainFinetuneRecipe(CONFIG)
    recipe.setup()
    recipe.run_train_validation_loop()


if __name__ == "__main__":
    main()
