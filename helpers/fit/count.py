"""SIMULATION: memory of a training step on one device, counted by part: the `Trainer` on fake tensors."""

from dataclasses import replace

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from helpers.models.llama import preset
from helpers.rush import Setup, Trainer

from .ledger import Ledger, Peak, deepened, split_step


def count(setup: Setup) -> Peak:
    """The peak of a training step of an uncompiled setup, after the first, by part. It takes a second."""
    if setup.compile != "none":
        raise ValueError(f"compile is {setup.compile!r}; what a compiler saves isn't counted: take 'none'")
    layers = setup.layers or preset(setup.model)["layers"]
    return deepened(lambda layers: counted(replace(setup, layers=layers)), layers)


def counted(setup: Setup) -> list[Peak]:
    """The peaks of a step's phases, with all layers of the setup."""
    ledger = Ledger(setup.batch * setup.sequence)
    with FakeTensorMode(), ledger:
        trainer = Trainer(setup, torch.device("cpu"))
        weights = list(trainer.model.parameters())
        for weight in weights:  # the optimizer's state, without the cost of a first step
            weight.grad = torch.zeros_like(weight)
        trainer.optimizer.step()
        trainer.optimizer.zero_grad(set_to_none=True)
        tokens = torch.zeros(setup.batch, setup.sequence + 1, dtype=torch.long)
        ledger.learn(trainer.model, trainer.optimizer, [tokens])
        for weight in weights:
            weight.register_post_accumulate_grad_hook(lambda weight: ledger.name("gradients", [weight.grad]))
        split_step(ledger, trainer.model.layers, trainer.optimizer)
        ledger.begin_phase(first=True)
        trainer.step(tokens)
    return ledger.peaks
