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
from helpers.lab import bench, compare, device, experiment, peak_memory
from helpers.lab.ceilings import copy
from helpers.lab.memory import GIB
from helpers.lab.records import Row
from helpers.lab.timing import queue_ahead, tensors
from helpers.train import PRECISIONS, Setup, Step

BOTH = ("segmentation", "lm")
SMALL_RUNS = [{"task": task, "precision": precision} for task in BOTH for precision in ("fp32", "amp", "dynamic")]
FULL_RUNS = [{"task": task, "precision": precision} for task in BOTH for precision in PRECISIONS]
SEEDS = range(3)
# An epoch of the language model has as many steps as ten of the pictures.
EPOCHS = {"small": {"segmentation": 1, "lm": 1}, "reduced": {"segmentation": 5, "lm": 1}}
EPOCHS |= {"full": {"segmentation": 5, "lm": 1}}


def _preset() -> str:
    """Runs are full-sized on a GPU only; the configurations of the small preset are few."""
    return "full" if device().type == "cuda" else "small"


def _setup(task: str, precision: str, seed: int = 0) -> Setup:
    preset = _preset()
    return Setup(task=task, precision=precision, preset=preset, epochs=EPOCHS[preset][task], seed=seed)


LEAST_BYTES = 32
BUSY_CYCLES = 4_000_000  # about 2 ms of a GPU: Python takes as long to queue a step
REFERENCES = {"no_scaler": variants.NO_SCALER, "torch": variants.TORCHS}


@experiment(
    small=[{"million_parameters": 1}],
    big_gpu=[{"million_parameters": size} for size in (10, 100, 1000)],
    version=3,
)
def scaler_step(million_parameters: int) -> list[Row]:
    """Unscale, clip and AdamW step: ours, torch's, and no scaler at all, from one interleaved run.

    Each step is queued while the GPU is busy with something else, as it is in training: what is measured is the work
    of the GPU, and, for a variant that waits for it, the wait. A fused AdamW and one norm must move at least 32 bytes a
    parameter.
    """
    elements = million_parameters * 10**6 // 16
    parameters = [torch.randn(elements, device=device()).requires_grad_() for _ in range(16)]
    scaled = [torch.randn(elements, device=device()) * variants.SCALE for _ in range(16)]
    for parameter in parameters:
        parameter.grad = torch.empty_like(parameter)

    def restore() -> None:
        torch._foreach_copy_([p.grad for p in parameters], scaled)
        queue_ahead(BUSY_CYCLES)

    steps = variants.scaler_steps(parameters)
    timed = compare(steps, check=False, before=restore)
    _, copy_gb_per_s = copy(4096 if device().type == "cuda" else 64)
    rows = []
    for name, step in steps.items():
        restore()
        timing = timed.timing(name)
        ratios = {f"ratio_to_{to}": timed.ratio(name, reference)[0] for to, reference in REFERENCES.items()}
        moved = LEAST_BYTES * 16 * elements / timing.median_ms / 1e6
        row = {"variant": name} | timing.row() | ratios
        rows.append(row | {"share_of_copy": moved / copy_gb_per_s, "host_reads": variants.host_reads(step)})
    return rows


LOSS_SCALE = 2.0**12  # lifts the gradients of a mean over millions of outputs into fp16's normal numbers


@experiment(
    small=[{"hidden": 32, "layers": 2, "batch": 8}],
    big_gpu=[{"hidden": 512, "layers": 8, "batch": 65536}, {"hidden": 2048, "layers": 8, "batch": 16384}],
    version=2,
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
    timed = compare({name: partial(run, region) for name, region in regions.items()}, tolerance=2e-2)
    return [
        {"variant": name}
        | timed.timing(name).row()
        | {"ratio_to_torch": timed.ratio(name, variants.TORCHS_AUTOCAST)[0]}
        for name in regions
    ]


@experiment(small=SMALL_RUNS, big_gpu=FULL_RUNS, version=2)
def gradient_time(task: str, precision: str) -> Row:
    """One gradient computation, forward and backward, of one batch.

    Its memory is that of weights and batch, and what the computation adds at its peak, gradients among it; not the
    pictures that lie on the device for other batches.
    """
    trainer = training.build(_setup(task, precision))
    model, scaler = trainer.model, trainer.scaler
    batch = next(trainer.epoch(0))

    def step() -> None:
        model.zero_grad()
        loss, _ = trainer.forward(batch)
        (loss if scaler is None else scaler.scale(loss)).backward()

    with trainer.settings():
        timing = bench(step)
        model.zero_grad()
        added = peak_memory(step).added_bytes
    held = _bytes([*model.parameters(), *model.buffers(), *tensors([batch.inputs, batch.targets, batch.options])])
    return timing.row() | {"peak_gib": (held + added) / GIB}


@experiment(
    small=[{"task": "segmentation", "precision": precision} for precision in ("amp", "static")],
    big_gpu=[
        {"task": task, "precision": p} for task in BOTH for p in ("fp32", "fp16", "amp", "static", "dynamic", "bf16")
    ],
    version=2,
)
def zeros(task: str, precision: str) -> list[Row]:
    """The share of weight gradients that are exactly zero, layer by layer, in the third step."""
    rows: list[Row] = []

    def look(step: Step) -> None:
        if step.number < 2:
            return
        for name, parameter in step.model.named_parameters():
            if parameter.grad is not None and parameter.dim() > 1:
                rows.append({"layer": name, "zero_share": float(zero_share([parameter.grad]))})
        raise _Enough

    with contextlib.suppress(_Enough):
        training.train(_setup(task, precision), on_step=look, progress=False)
    return rows


LOWEST, HIGHEST = -60, 20  # exponents that are told apart; fp16 ends at -24, with subnormal numbers


@experiment(small=[{"task": "segmentation"}], big_gpu=[{"task": task} for task in BOTH], version=2)
def exponents(task: str) -> list[Row]:
    """The exponents of gradients in an fp32 run, of activations and of weights: which of them fp16 can hold.

    Taken in the third step. A row is the share of all values with that exponent; the exponent of 0 is empty.
    """
    kinds: dict[str, list[Tensor]] = {"activations": [], "weights": []}

    def watch(_module: nn.Module, _inputs: tuple, output: Tensor) -> None:
        output.register_hook(lambda grad: kinds["activations"].append(count_exponents(grad)))

    def look(step: Step) -> None:
        if step.number == 0:
            for module in step.model.modules():
                if isinstance(module, (nn.Conv2d, nn.ConvTranspose2d, nn.Linear, nn.BatchNorm2d, nn.LayerNorm)):
                    module.register_forward_hook(watch)
        if step.number < 2:
            kinds["activations"].clear()
            return
        kinds["weights"] = [count_exponents(p.grad) for p in step.model.parameters() if p.grad is not None]
        raise _Enough

    with contextlib.suppress(_Enough):
        training.train(_setup(task, "fp32"), on_step=look, progress=False)
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
    small=[run | {"seed": 0, "size": "small"} for run in SMALL_RUNS],
    cpu=[
        {"task": "segmentation", "precision": precision, "seed": seed, "size": "reduced"}
        for seed in SEEDS
        for precision in ("fp32", "bf16", "amp", "static", "dynamic")
    ],
    big_gpu=[run | {"seed": seed, "size": "full"} for seed in SEEDS for run in FULL_RUNS],
    version=2,
)
def quality(task: str, precision: str, seed: int, size: str) -> Row:
    """A whole training run: validation accuracy and loss after the last epoch, and what happened to its gradients.

    The reduced size, 64 pixels a side and 160 steps, is what a CPU trains in minutes. What 16 bits can hold doesn't
    depend on the device.
    """
    setup = Setup(task=task, precision=precision, preset=size, epochs=EPOCHS[size][task], seed=seed)
    row, curve = _trained(setup)
    if seed == 0:
        _curve_of[setup] = curve
    return row


@experiment(small=SMALL_RUNS, big_gpu=FULL_RUNS, version=2)
def curves(task: str, precision: str) -> list[Row]:
    """Loss and scale over the steps of one run, every few steps: the run of seed 0 in `quality`.

    It is trained once for both tables where one process measures both, and again where `curves` is measured alone.
    """
    setup = _setup(task, precision)
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

    outcome = training.train(setup, on_step=look, progress=False)
    row = {
        "validation_accuracy": outcome["validation_accuracy"],
        "validation_loss": outcome["validation_loss"],
        "train_loss": outcome["train_loss"],
        "diverged": "yes" if outcome["diverged"] else "no",
        "zero_share": float(torch.stack(shares).mean()),
        "skipped_steps": outcome["skipped_steps"],
        "final_scale": outcome["scale"],
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


def count_exponents(values: Tensor) -> Tensor:
    """Counts of values by exponent: at 0 the exact zeros, then LOWEST to HIGHEST. Nothing is read on the host."""
    magnitude = values.detach().float().abs()
    exponent = torch.frexp(magnitude).exponent - 1
    bins = torch.where(magnitude == 0, 0, exponent.clamp(LOWEST, HIGHEST) - LOWEST + 1)
    return torch.bincount(bins.flatten().long(), minlength=HIGHEST - LOWEST + 2)


def zero_share(grads: list[Tensor]) -> Tensor:
    """The share of all their values that is exactly zero."""
    return sum((g == 0).sum() for g in grads) / sum(g.numel() for g in grads)


def _bytes(held: Iterable[Tensor]) -> int:
    """What tensors take, a storage that several share counted once."""
    storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in held}
    return sum(storages.values())


class _Enough(Exception):
    """Ends a run that was only looked at."""
