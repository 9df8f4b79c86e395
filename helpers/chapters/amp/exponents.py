"""Where the exponents of gradients lie, and which share of them fp16 loses."""

import contextlib
from types import SimpleNamespace

import pandas as pd
import torch
from torch import Tensor, nn

from ... import train as training
from ...book.table import Worth, table
from ...book.values import PERCENT, Number, lacking
from ...lab import Row
from ...train import Step
from .trainings import BOTH, LOOKED_AT, TASKS, LookedAt, training_setup

LOWEST, HIGHEST = -60, 20  # exponents in separate bins; fp16 ends at -24, with subnormal numbers
ZERO = -25  # fp16 rounds numbers of smaller exponents to zero


@table(
    small=[{"task": "segmentation", "size": "small"}],
    cpu=[{"task": task, "size": "reduced"} for task in BOTH],
    gpu=[{"task": task, "size": "reduced"} for task in BOTH],
    big_gpu=[{"task": task, "size": "full"} for task in BOTH],
    columns="kind exponent share",
    timed=False,
    version=3,
    worth=Worth(6, "why fp16 needs scaling", cpu=2, gpu=3, big_gpu=6),
)
def exponents(task: str, size: str) -> list[Row]:
    """The exponents of gradients in one step of an fp32 run, of activations and of weights.

    A row is the share of all values with that exponent; the exponent of 0 is empty.
    """
    last = LOOKED_AT[size]
    kinds: dict[str, list[Tensor]] = {"activations": [], "weights": []}

    def watch(_module: nn.Module, _inputs: tuple, output: Tensor) -> None:
        if output.requires_grad:  # not in validation
            output.register_hook(lambda grad: kinds["activations"].append(count_exponents(grad)))

    def look(step: Step) -> None:
        if step.number == last - 1:
            for module in step.model.modules():
                if isinstance(module, (nn.Conv2d, nn.ConvTranspose2d, nn.Linear, nn.BatchNorm2d, nn.LayerNorm)):
                    module.register_forward_hook(watch)
        if step.number < last:
            return
        kinds["weights"] = [count_exponents(p.grad) for p in step.model.parameters() if p.grad is not None]
        raise LookedAt

    with contextlib.suppress(LookedAt):
        training.train(training_setup(task, "fp32", size), on_step=look, progress=False)
    rows = []
    for kind, histograms in kinds.items():
        total = torch.stack(histograms).sum(dim=0)
        shares = (total / total.sum()).tolist()
        rows += [
            {"kind": kind, "exponent": None if place == 0 else place - 1 + LOWEST, "share": share}
            for place, share in enumerate(shares)
            if share > 0
        ]
    return rows


def count_exponents(values: Tensor) -> Tensor:
    """Counts of values by exponent: at 0 the exact zeros, then LOWEST to HIGHEST. Nothing is read on the host."""
    magnitude = values.detach().float().abs()
    exponent = torch.frexp(magnitude).exponent - 1
    bins = torch.where(magnitude == 0, 0, exponent.clamp(LOWEST, HIGHEST) - LOWEST + 1)
    return torch.bincount(bins.flatten().long(), minlength=HIGHEST - LOWEST + 2)


@exponents.numbers()
def _(rows: pd.DataFrame) -> SimpleNamespace:
    """Shares of nonzero gradients by exponent: task → kind → rows.

    `zeroed` is the share of each task's activation gradients that fp16 rounds to zero.
    """
    tasks: dict[str, dict[str, pd.DataFrame]] = {}
    zeroed = {task: lacking(name, PERCENT) for task, name in TASKS.items()}
    for (task, kind), part in rows.dropna(subset="exponent").groupby(["task", "kind"], sort=False):
        tasks.setdefault(task, {})[kind] = part
        if kind == "activations":
            below = part.loc[part["exponent"] < ZERO, "share"].sum() / part["share"].sum()
            zeroed[task] = Number(below, PERCENT, decimals=0)
    return SimpleNamespace(tasks=tasks, zeroed=zeroed)
