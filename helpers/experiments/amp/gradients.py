"""One gradient computation in each precision: its time and memory, and which gradients underflow."""

import contextlib

import torch
from torch import Tensor, nn

from ... import train as training
from ...lab import Worth, bench, experiment, peak_memory
from ...lab.memory import GIB
from ...lab.precision import fp16_by_fp32
from ...lab.records import Row
from ...lab.timing import tensors
from ...train import Step
from .setups import BOTH, SMALL_RUNS, runs, training_setup

LOWEST, HIGHEST = -60, 20  # exponents in separate bins; fp16 ends at -24, with subnormal numbers
TORCHS_KERNELS, FP32_KERNELS = "torch's", "fp32's, rounded"
TIMED = ("fp32", "fp16", "amp", "static", "dynamic", "bf16")


@experiment(
    small=[run | {"kernels": FP32_KERNELS} for run in SMALL_RUNS],
    cpu=[
        *(run | {"kernels": TORCHS_KERNELS} for run in runs("reduced", ("fp32", "bf16"))),
        *(run | {"kernels": FP32_KERNELS} for run in runs("reduced", ("fp16", "amp", "static", "dynamic"))),
        *(run | {"kernels": TORCHS_KERNELS} for run in runs("reduced", ("dynamic",), ["segmentation"])),
    ],
    gpu=[run | {"kernels": TORCHS_KERNELS} for run in runs("reduced", TIMED)],
    big_gpu=[run | {"kernels": TORCHS_KERNELS} for run in runs("full", TIMED)],
    columns="median_ms p20_ms p80_ms n peak_gib",
    version=3,
    worth=Worth(40, "one gradient in each precision", cpu=5.2, gpu=4, big_gpu=3),
)
def gradient_time(task: str, precision: str, size: str, kernels: str) -> Row:
    """One gradient computation, forward and backward, of one batch.

    `kernels` says which ones compute products of fp16 numbers on a CPU: torch's, or, for a CPU without fp16 units,
    those of fp32 with the results rounded. Its memory is that of weights and batch, and what the computation adds at
    its peak, gradients among it; not the pictures that lie on the device for other batches.
    """
    trainer = training.build_trainer(training_setup(task, precision, size))
    model, scaler = trainer.model, trainer.scaler
    batch = next(trainer.epoch(0))

    def step() -> None:
        model.zero_grad()
        loss, _ = trainer.forward(batch)
        (loss if scaler is None else scaler.scale(loss)).backward()

    with trainer.settings(), fp16_by_fp32() if kernels == FP32_KERNELS else contextlib.nullcontext():
        timing = bench(step)
        model.zero_grad()
        added = peak_memory(step).added_bytes
    resident = [*model.parameters(), *model.buffers(), *tensors([batch.inputs, batch.targets, batch.options])]
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in resident}  # each once
    return timing.row() | {"peak_gib": (sum(storages.values()) + added) / GIB}


# The step whose gradients are looked at: those of the first ones are larger than what follows.
LOOKED_AT = {"small": 2, "reduced": 20, "full": 20}


@experiment(
    small=runs("small", ("amp", "static"), ["segmentation"]),
    cpu=runs("reduced", TIMED),
    gpu=runs("reduced", TIMED),
    big_gpu=runs("full", TIMED),
    columns="layer step weights zero_share",
    timed=False,
    version=3,
    worth=Worth(6, "gradients that become zero", cpu=2.2, gpu=3, big_gpu=3),
)
def zeros(task: str, precision: str, size: str) -> list[Row]:
    """The share of weight gradients that are exactly zero, layer by layer, in one step; none if some aren't finite."""
    rows: list[Row] = []

    def look(step: Step) -> None:
        if step.number < LOOKED_AT[size]:
            return
        for name, parameter in step.model.named_parameters():
            if parameter.grad is not None and parameter.dim() > 1:
                share = float(zero_share([parameter.grad])) if parameter.grad.isfinite().all() else None
                rows.append({"layer": name, "step": step.number + 1, "weights": parameter.numel(), "zero_share": share})
        raise _LookedAt

    with contextlib.suppress(_LookedAt), fp16_by_fp32():
        training.train(training_setup(task, precision, size), on_step=look, progress=False)
    return rows


@experiment(
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
        raise _LookedAt

    with contextlib.suppress(_LookedAt):
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


def zero_share(grads: list[Tensor]) -> Tensor:
    """The share of all their values that is exactly zero."""
    return sum((g == 0).sum() for g in grads) / sum(g.numel() for g in grads)


class _LookedAt(Exception):
    """Ends a run that was only looked at."""
