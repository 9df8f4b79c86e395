"""What chapter 1 measures: where fp16 loses gradients, what each precision costs and how well it trains.

What takes seconds stands first, for the order here is the order of measuring: one whole training after another comes
last, so that a budget that ends among them leaves the rest complete.
"""

import contextlib
from collections.abc import Callable, Iterable
from functools import partial

import torch
from torch import Tensor, nn

from helpers import train as training
from helpers.amp import variants
from helpers.amp.variants import LOWEST, count_exponents, zero_share
from helpers.lab import Comparison, bench, compare, device, experiment, peak_memory
from helpers.lab.ceilings import copy, large_copy
from helpers.lab.memory import GIB
from helpers.lab.precision import fp16_by_fp32
from helpers.lab.records import Row
from helpers.lab.timing import queue_ahead, tensors
from helpers.text import local_wikitext
from helpers.train import PRECISIONS, Setup, Step
from helpers.training import Task

BOTH, SEEDS = ("segmentation", "lm"), range(3)
SIZES = ("small", "reduced", "full")  # of the trainings: for tests, for a CPU or a GPU of 8 GB, for a big GPU
# An epoch of the language model has as many steps as several of the pictures.
EPOCHS = {
    "small": {"segmentation": 1, "lm": 1},
    "reduced": {"segmentation": 4, "lm": 1},
    "full": {"segmentation": 5, "lm": 1},
}
# Good steps until the dynamic scale doubles; the usual 2000 steps are longer than these runs.
GROWTH_INTERVAL = {"small": 50, "reduced": 5, "full": 50}


def _runs(size: str, precisions: Iterable[str], tasks: Iterable[str] = BOTH, **more: object) -> list[Row]:
    return [{"task": task, "precision": p, "size": size} | more for task in tasks for p in precisions]


SMALL_RUNS, ALL_RUNS = _runs("small", ("fp32", "amp", "dynamic")), {size: _runs(size, PRECISIONS) for size in SIZES}


def _setup(task: str, precision: str, size: str, seed: int = 0) -> Setup:
    """A training; on a CPU with what is there of WikiText, if it is."""
    growth, path = GROWTH_INTERVAL[size], local_wikitext() if task == "lm" and size != "small" else None
    run = {"epochs": EPOCHS[size][task], "growth_interval": growth, "path": path, "seed": seed}
    return Setup(task=task, precision=precision, preset=size, **run)


LEAST_BYTES = 32
BUSY_CYCLES = 4_000_000  # about 2 ms of a GPU: Python takes as long to queue a step
REFERENCES = {"no_scaler": variants.NO_SCALER, "torch": variants.TORCHS}


@experiment(
    small=[{"million_parameters": 1}],
    cpu=[{"million_parameters": 24}],
    gpu=[{"million_parameters": size} for size in (10, 100)],
    big_gpu=[{"million_parameters": size} for size in (10, 100, 1000)],
    version=4,
)
def scaler_step(million_parameters: int) -> list[Row]:
    """Unscale, clip and AdamW step: ours, torch's, and no scaler at all, from one interleaved run.

    The parameters have the shapes of a decoder's. Each step is queued while the GPU is busy with something else, as it
    is in training: what is measured is the work of the GPU, and, for a variant that waits for it, the wait. A fused
    AdamW and one norm must move at least 32 bytes a parameter.
    """
    shapes = variants.decoder_shapes(million_parameters)
    parameters = [torch.randn(shape, device=device()).requires_grad_() for shape in shapes]
    scaled = [torch.randn(shape, device=device()) * variants.SCALE for shape in shapes]
    for parameter in parameters:
        parameter.grad = torch.empty_like(parameter)

    def restore() -> None:
        torch._foreach_copy_([p.grad for p in parameters], scaled)
        queue_ahead(BUSY_CYCLES)

    steps = variants.scaler_steps(parameters)
    timed = compare(steps, check=False, before=restore, rounds=60 if device().type == "cpu" else 20)
    _, copy_gb_per_s = copy(large_copy(on_cpu=64))
    elements = sum(parameter.numel() for parameter in parameters)
    rows = []
    for name, step in steps.items():
        restore()
        row = {"variant": name, "tensors": len(shapes)} | timed.timing(name).row()
        for called, reference in REFERENCES.items():
            row |= _against(timed, name, reference, called)
        moved = LEAST_BYTES * elements / timed.timing(name).median_ms / 1e6
        rows.append(row | {"share_of_copy": moved / copy_gb_per_s, "host_reads": variants.host_reads(step)})
    return rows


def _against(timed: Comparison, variant: str, to: str, called: str) -> Row:
    """A variant's ratio to a baseline, with the baseline's time, in columns that name it."""
    row = timed.row(variant, to)
    spread = {f"ratio_to_{called}_{p}": row[f"ratio_{p}"] for p in ("p20", "p80")}
    return {f"{called}_ms": row["baseline_ms"], f"ratio_to_{called}": row["ratio"]} | spread


LOSS_SCALE = 2.0**12  # lifts the gradients of a mean over millions of outputs into fp16's normal numbers


@experiment(
    small=[{"hidden": 32, "layers": 2, "batch": 8}],
    cpu=[{"hidden": 512, "layers": 8, "batch": 4096}, {"hidden": 1024, "layers": 4, "batch": 2048}],
    gpu=[{"hidden": 512, "layers": 8, "batch": 16384}, {"hidden": 2048, "layers": 8, "batch": 4096}],
    big_gpu=[{"hidden": 512, "layers": 8, "batch": 65536}, {"hidden": 2048, "layers": 8, "batch": 16384}],
    version=3,
)
def autocast_overhead(hidden: int, layers: int, batch: int) -> list[Row]:
    """A training step of a stack of Linear, LayerNorm, GELU without autocast, under torch's and under ours.

    Batches are so large that the GPU takes longer than Python; with small ones it would be Python's time. The loss
    is scaled for all three, for without it most gradients in fp16 are zeros, which a GPU multiplies faster.
    """
    dtype = torch.bfloat16 if device().type == "cpu" else torch.float16
    blocks = [nn.Sequential(nn.Linear(hidden, hidden), nn.LayerNorm(hidden), nn.GELU()) for _ in range(layers)]
    model = nn.Sequential(*blocks).to(device())
    x = torch.randn(batch, hidden, device=device())
    regions = variants.regions(dtype)

    def run(region: Callable) -> Tensor:
        model.zero_grad()
        with region():
            loss = model(x).float().pow(2).mean()
        (loss * LOSS_SCALE).backward()
        return loss.detach()

    variants.check_same_casts(model, run, regions[variants.OURS], regions[variants.TORCHS_AUTOCAST])
    timed = compare({name: partial(run, region) for name, region in regions.items()}, tolerance=2e-2, rounds=30)
    return [
        {"variant": name, "dtype": str(dtype).removeprefix("torch.")}
        | timed.timing(name).row()
        | _against(timed, name, variants.TORCHS_AUTOCAST, "torch")
        for name in regions
    ]


TORCHS_KERNELS, WIDE = "torch's", "fp32's, rounded"
TIMED = ("fp32", "fp16", "amp", "static", "dynamic", "bf16")


@experiment(
    small=[run | {"kernels": WIDE} for run in SMALL_RUNS],
    cpu=[
        *(run | {"kernels": TORCHS_KERNELS} for run in _runs("reduced", ("fp32", "bf16"))),
        *(run | {"kernels": WIDE} for run in _runs("reduced", ("fp16", "amp", "static", "dynamic"))),
        *(run | {"kernels": TORCHS_KERNELS} for run in _runs("reduced", ("dynamic",), ["segmentation"])),
    ],
    gpu=[run | {"kernels": TORCHS_KERNELS} for run in _runs("reduced", TIMED)],
    big_gpu=[run | {"kernels": TORCHS_KERNELS} for run in _runs("full", TIMED)],
    version=3,
)
def gradient_time(task: str, precision: str, size: str, kernels: str) -> Row:
    """One gradient computation, forward and backward, of one batch.

    `kernels` says which ones compute products of fp16 numbers on a CPU: torch's, or, for a CPU without fp16 units,
    those of fp32 with the results rounded. Its memory is that of weights and batch, and what the computation adds at
    its peak, gradients among it; not the pictures that lie on the device for other batches.
    """
    trainer = training.build(_setup(task, precision, size))
    model, scaler = trainer.model, trainer.scaler
    batch = next(trainer.epoch(0))

    def step() -> None:
        model.zero_grad()
        loss, _ = trainer.forward(batch)
        (loss if scaler is None else scaler.scale(loss)).backward()

    with trainer.settings(), fp16_by_fp32() if kernels == WIDE else contextlib.nullcontext():
        timing = bench(step)
        model.zero_grad()
        added = peak_memory(step).added_bytes
    held = _bytes([*model.parameters(), *model.buffers(), *tensors([batch.inputs, batch.targets, batch.options])])
    return timing.row() | {"peak_gib": (held + added) / GIB}


# The step whose gradients are looked at: those of the first ones are larger than what follows.
LOOKED_AT = {"small": 2, "reduced": 20, "full": 20}


@experiment(
    small=_runs("small", ("amp", "static"), ["segmentation"]),
    cpu=_runs("reduced", TIMED),
    gpu=_runs("reduced", TIMED),
    big_gpu=_runs("full", TIMED),
    version=3,
)
def zeros(task: str, precision: str, size: str) -> list[Row]:
    """The share of weight gradients that are exactly zero, layer by layer, in one step; none if some aren't finite."""
    rows: list[Row] = []

    def look(step: Step) -> None:
        if step.number < LOOKED_AT[size]:
            return
        for name, parameter in step.model.named_parameters():
            if parameter.grad is not None and parameter.dim() > 1:
                finite = bool(torch.isfinite(parameter.grad).all())
                share = float(zero_share([parameter.grad])) if finite else None
                rows.append({"layer": name, "step": step.number + 1, "weights": parameter.numel(), "zero_share": share})
        raise _Enough

    with contextlib.suppress(_Enough), fp16_by_fp32():
        training.train(_setup(task, precision, size), on_step=look, progress=False)
    return rows


@experiment(
    small=[{"task": "segmentation", "size": "small"}],
    cpu=[{"task": task, "size": "reduced"} for task in BOTH],
    gpu=[{"task": task, "size": "reduced"} for task in BOTH],
    big_gpu=[{"task": task, "size": "full"} for task in BOTH],
    version=3,
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
        raise _Enough

    with contextlib.suppress(_Enough):
        training.train(_setup(task, "fp32", size), on_step=look, progress=False)
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


@experiment(
    small=[run | {"seed": 0} for run in SMALL_RUNS],
    cpu=[run | {"seed": seed} for seed in SEEDS for run in ALL_RUNS["reduced"]],
    gpu=[run | {"seed": seed} for seed in SEEDS for run in ALL_RUNS["reduced"]],
    big_gpu=[run | {"seed": seed} for seed in SEEDS for run in ALL_RUNS["full"]],
    version=3,
)
def quality(task: str, precision: str, size: str, seed: int) -> Row:
    """A whole training run: validation accuracy and loss after the last epoch, and what happened to its gradients.

    The reduced size is what a CPU trains in seconds: the gradients of one micro-batch of a step of the full size, which
    are as small. On a CPU, products of fp16 numbers are computed by fp32 kernels and rounded, as tensor cores do.
    `constant_accuracy` is that of the best constant guess on the validation split.
    """
    setup = _setup(task, precision, size, seed)
    row, curve = _trained(setup)
    if seed == 0:
        _curve_of[setup] = curve
    return row


@experiment(small=SMALL_RUNS, cpu=ALL_RUNS["reduced"], gpu=ALL_RUNS["reduced"], big_gpu=ALL_RUNS["full"], version=3)
def curves(task: str, precision: str, size: str) -> list[Row]:
    """Loss and scale over the steps of one run, every few steps: the run of seed 0 in `quality`.

    It is trained once for both tables where one process measures both, and again where `curves` is measured alone.
    """
    setup = _setup(task, precision, size)
    return _curve_of.pop(setup, None) or _trained(setup)[1]


_curve_of: dict[Setup, list[Row]] = {}  # of runs that `quality` has measured, until `curves` takes them


def _trained(setup: Setup) -> tuple[Row, list[Row]]:
    """How a training went: in one row, and by its steps."""
    shares: list[Tensor] = []
    seen: list[tuple[int, Tensor, Tensor, Tensor]] = []

    def look(step: Step) -> None:
        if step.number % 10 == 0:
            shares.append(zero_share([p.grad for p in step.model.parameters() if p.grad is not None]))
        scale, skipped = getattr(step.scaler, "_scale", None), getattr(step.scaler, "_skipped", None)
        nothing = torch.full((), float("nan"), device=step.loss.device)
        held = [nothing if value is None else value.detach().float().clone() for value in (scale, skipped)]
        seen.append((step.number, step.loss.float(), *held))

    with fp16_by_fp32():
        outcome = training.train(setup, on_step=look, progress=False)
    task = training.build_task(setup, device())
    row = {
        "validation_accuracy": outcome["validation_accuracy"],
        "validation_loss": outcome["validation_loss"],
        "constant_accuracy": _constant_accuracy(task),
        "train_loss": outcome["train_loss"],
        "diverged": "yes" if outcome["diverged"] else "no",
        "zero_share": float(torch.stack(shares).mean()),
        "skipped_steps": outcome["skipped_steps"],
        "first_scale": float(seen[0][2]),
        "final_scale": outcome["scale"],
        "growth_interval": setup.growth_interval,
        "micro_batches": task.micro_batches,
        "steps": outcome["steps"],
        "train_s": outcome["seconds"],
        "source": outcome["source"],
    }
    every = max(len(seen) // 80, 1)
    curve = [
        {"step": number, "loss": float(loss), "scale": float(scale), "skipped_steps": float(skipped)}
        for number, loss, scale, skipped in seen
        if number % every == 0 or number == len(seen) - 1
    ]
    return row, curve


def _constant_accuracy(task: Task) -> float:
    """The validation accuracy of the constant guess that is right most often in training. Padding doesn't count."""

    def counts(batches: Iterable) -> Tensor:
        targets = torch.cat([batch.targets.flatten() for batch in batches]).long()
        found = torch.bincount(targets, minlength=2**16)
        found[getattr(task.validation_metric, "pad_id", -1)] = 0
        return found

    validation = counts(task.validation())
    return float(validation[counts(task.batches(0, 0)).argmax()] / validation.sum())


def _bytes(held: Iterable[Tensor]) -> int:
    """What tensors take, a storage that several share counted once."""
    storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in held}
    return sum(storages.values())


class _Enough(Exception):
    """Ends a run that was only looked at."""
