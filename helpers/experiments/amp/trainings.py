"""Whole trainings in each precision: how well they end, and loss and scale over their steps."""

from collections.abc import Iterable

import torch
from torch import Tensor

from ... import train as training
from ...lab import Worth, device, experiment
from ...lab.precision import fp16_by_fp32
from ...lab.records import Row
from ...train import PRECISIONS, Setup, Step
from ...training import Task
from .gradients import zero_share
from .setups import FULL_RUNS, LONG_RUNS, SEEDS, SMALL_RUNS, runs, training_setup

QUALITY = """
    validation_accuracy validation_loss constant_accuracy diverged zero_share skipped_steps first_scale growth_interval
    micro_batches steps source training_s
"""
REDUCED_RUNS = [run | {"seed": 0} for run in LONG_RUNS]
REDUCED_RUNS += [run | {"seed": seed} for seed in SEEDS[1:] for run in runs("reduced", PRECISIONS, ["lm"])]
# More seeds for what is claimed: short trainings of the language model differ by seed more than by precision
COMPARED = ("fp32", "amp", "static", "dynamic", "bf16")
REDUCED_RUNS += [run | {"seed": seed} for seed in SEEDS[1:] for run in runs("long", COMPARED, ["segmentation"])]
REDUCED_RUNS += [run | {"seed": 3 + more} for more in SEEDS for run in runs("reduced", COMPARED[:4], ["lm"])]
REDUCED_RUNS.sort(key=lambda run: run["seed"])


@experiment(
    small=[run | {"seed": 0} for run in SMALL_RUNS],
    cpu=REDUCED_RUNS,
    gpu=REDUCED_RUNS,
    big_gpu=[run | {"seed": seed} for seed in SEEDS for run in FULL_RUNS],
    columns=QUALITY,
    version=3,
    worth=Worth(
        40,
        "loss and accuracy in each precision, with and without scaling",
        cpu=20,
        gpu=8,
        big_gpu=14,
        headline={"seed": (0,), "task": ("segmentation",), "precision": ("fp32", "amp", "static", "dynamic")},
        on_gpu=7,
    ),
)
def quality(task: str, precision: str, size: str, seed: int) -> Row:
    """A whole training run: validation accuracy and loss after the last epoch, and what happened to its gradients.

    On a CPU the gradients are those of one micro-batch of a step of the full size, which are as small, and products of
    fp16 numbers are computed by fp32 kernels and rounded, as tensor cores do.
    `constant_accuracy` is that of the best constant guess on the validation split.
    """
    setup = training_setup(task, precision, size, seed)
    row, curve = _trained(setup)
    if seed == 0:
        _curve_of[setup] = curve
    return row


@experiment(
    small=SMALL_RUNS,
    cpu=LONG_RUNS,
    gpu=LONG_RUNS,
    big_gpu=FULL_RUNS,
    columns="step loss scale",
    timed=False,
    version=3,
    worth=Worth(1, "the loss over the steps", cpu=0.4, gpu=8, big_gpu=14),
)
def curves(task: str, precision: str, size: str) -> list[Row]:
    """Loss and scale over the steps of one run, every few steps: the run of seed 0 in `quality`.

    It is trained once for both tables where one process measures both, and again where `curves` is measured alone.
    """
    setup = training_setup(task, precision, size)
    return _curve_of.pop(setup, None) or _trained(setup)[1]


_curve_of: dict[Setup, list[Row]] = {}  # of runs that `quality` has measured, until `curves` takes them


def _trained(setup: Setup) -> tuple[Row, list[Row]]:
    """How a training went: in one row, and by its steps."""
    shares: list[Tensor] = []
    seen: list[tuple[int, Tensor, Tensor]] = []

    def look(step: Step) -> None:
        if step.number % 10 == 0:
            shares.append(zero_share([p.grad for p in step.model.parameters() if p.grad is not None]))
        scale = getattr(step.scaler, "_scale", None)
        scale = step.loss.new_full((), float("nan")) if scale is None else scale.detach().float().clone()
        seen.append((step.number, step.loss.float(), scale))

    with fp16_by_fp32():
        outcome = training.train(setup, on_step=look, progress=False)
    task = training.build_task(setup, device())
    names = ("validation_accuracy", "validation_loss", "skipped_steps", "steps", "source")
    row = {name: outcome[name] for name in names} | {
        "training_s": outcome["seconds"],
        "constant_accuracy": constant_accuracy(task),
        "diverged": "yes" if outcome["diverged"] else "no",
        "zero_share": float(torch.stack(shares).mean()),
        "first_scale": float(seen[0][2]),
        "growth_interval": setup.growth_interval,
        "micro_batches": task.micro_batches,
    }
    every = max(len(seen) // 80, 1)
    curve = [
        {"step": number, "loss": float(loss), "scale": float(scale)}
        for number, loss, scale in seen
        if number % every == 0 or number == len(seen) - 1
    ]
    return row, curve


def constant_accuracy(task: Task) -> float:
    """The validation accuracy of the constant guess that is right most often in training. Padding doesn't count."""

    def counts(batches: Iterable) -> Tensor:
        targets = torch.cat([batch.targets.flatten() for batch in batches]).long()
        by_class = torch.bincount(targets, minlength=2**16)
        by_class[getattr(task.validation_metric, "pad_id", -1)] = 0
        return by_class

    validation = counts(task.validation())
    return float(validation[counts(task.batches(0)).argmax()] / validation.sum())
