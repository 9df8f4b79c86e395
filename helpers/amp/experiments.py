"""What chapter 1 measures: where fp16 loses gradients, what each precision costs and how well it trains."""

import contextlib
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from helpers import train as training
from helpers.lab import bench, compare, device, experiment, peak_memory
from helpers.lab.ceilings import copy
from helpers.lab.records import Row
from helpers.train import PRECISIONS, Setup, Step

from .autocast import Autocast
from .dynamic import DynamicGradScaler

BOTH = ("segmentation", "lm")
SMALL_RUNS = [{"task": task, "precision": precision} for task in BOTH for precision in ("fp32", "amp", "dynamic")]
FULL_RUNS = [{"task": task, "precision": precision} for task in BOTH for precision in PRECISIONS]
EPOCHS = {"small": 1, "full": 5}


def _preset() -> str:
    """Runs are full-sized on a GPU only; the configurations of the small preset are few."""
    return "full" if device().type == "cuda" else "small"


@experiment(
    small=[run | {"seed": 0} for run in SMALL_RUNS], full=[r | {"seed": s} for r in FULL_RUNS for s in range(3)]
)
def quality(task: str, precision: str, seed: int) -> Row:
    """A whole training run: validation accuracy and loss after the last epoch, and what happened to its gradients."""
    preset = _preset()
    return _trained(Setup(task=task, precision=precision, preset=preset, epochs=EPOCHS[preset], seed=seed))


@experiment(
    small=[{"pixels": 16, "precision": "dynamic", "seed": 0}],
    full=[
        {"pixels": 64, "precision": precision, "seed": seed}
        for seed in range(3)
        for precision in ("fp32", "bf16", "amp", "static", "dynamic")
    ],
    host=True,
)
def reduced_quality(pixels: int, precision: str, seed: int) -> Row:
    """The same for segmentation at a size that a CPU trains in minutes: 64 pixels a side, 160 steps.

    What 16 bits can hold doesn't depend on the device, so a CPU shows what scaling does to training, if not to speed.
    """
    preset = {16: "small", 64: "reduced"}[pixels]
    return _trained(Setup(task="segmentation", precision=precision, preset=preset, epochs=5, seed=seed))


def _trained(setup: Setup) -> Row:
    zeros: list[Tensor] = []

    def look(step: Step) -> None:
        if step.number % 10 == 0:
            zeros.append(_zero_share([p.grad for p in step.model.parameters() if p.grad is not None]))

    found = training.train(setup, on_step=look, progress=False)
    return {
        "validation_accuracy": found["validation_accuracy"],
        "validation_loss": found["validation_loss"],
        "train_loss": found["train_loss"],
        "diverged": "yes" if found["diverged"] else "no",
        "zero_share": float(torch.stack(zeros).mean()),
        "skipped_steps": found["skipped_steps"],
        "final_scale": found["scale"],
        "steps": found["steps"],
        "train_s": found["seconds"],
        "source": found["source"],
    }


@experiment(small=SMALL_RUNS, full=FULL_RUNS)
def curves(task: str, precision: str) -> list[Row]:
    """Loss and scale over the steps of one run, every few steps."""
    preset = _preset()
    setup = Setup(task=task, precision=precision, preset=preset, epochs=EPOCHS[preset])
    seen: list[tuple[int, Tensor, Tensor, Tensor]] = []

    def look(step: Step) -> None:
        scale, skipped = getattr(step.scaler, "_scale", None), getattr(step.scaler, "_skipped", None)
        nothing = torch.full((), float("nan"), device=step.loss.device)
        held = [nothing if value is None else value.detach().float().clone() for value in (scale, skipped)]
        seen.append((step.number, step.loss.float(), *held))

    training.train(setup, on_step=look, progress=False)
    every = max(len(seen) // 80, 1)
    return [
        {"step": number, "loss": float(loss), "scale": float(scale), "skipped_steps": float(skipped)}
        for number, loss, scale, skipped in seen
        if number % every == 0 or number == len(seen) - 1
    ]


@experiment(small=[{"task": "segmentation"}], full=[{"task": task} for task in BOTH])
def exponents(task: str) -> list[Row]:
    """The exponents of gradients in an fp32 run, of activations and of weights: which of them fp16 can hold.

    Taken in the third step. A row is the share of all values with that exponent; the exponent of 0 is empty.
    """
    kinds: dict[str, list[Tensor]] = {"activations": [], "weights": []}
    setup = Setup(task=task, precision="fp32", preset=_preset(), epochs=EPOCHS[_preset()])

    def watch(_module: nn.Module, _inputs: tuple, output: Tensor) -> None:
        output.register_hook(lambda grad: kinds["activations"].append(_exponents(grad)))

    def look(step: Step) -> None:
        if step.number == 0:
            for module in step.model.modules():
                if isinstance(module, (nn.Conv2d, nn.ConvTranspose2d, nn.Linear, nn.BatchNorm2d, nn.LayerNorm)):
                    module.register_forward_hook(watch)
        if step.number < 2:
            kinds["activations"].clear()
            return
        kinds["weights"] = [_exponents(p.grad) for p in step.model.parameters() if p.grad is not None]
        raise _Enough

    with contextlib.suppress(_Enough):
        training.train(setup, on_step=look, progress=False)
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
    small=[{"task": "segmentation", "precision": precision} for precision in ("amp", "static")],
    full=[
        {"task": task, "precision": p} for task in BOTH for p in ("fp32", "fp16", "amp", "static", "dynamic", "bf16")
    ],
)
def zeros(task: str, precision: str) -> list[Row]:
    """The share of weight gradients that are exactly zero, layer by layer, in the third step."""
    rows: list[Row] = []
    setup = Setup(task=task, precision=precision, preset=_preset(), epochs=EPOCHS[_preset()])

    def look(step: Step) -> None:
        if step.number < 2:
            return
        for name, parameter in step.model.named_parameters():
            if parameter.grad is not None and parameter.dim() > 1:
                rows.append({"layer": name, "zero_share": float(_zero_share([parameter.grad]))})
        raise _Enough

    with contextlib.suppress(_Enough):
        training.train(setup, on_step=look, progress=False)
    return rows


@experiment(small=SMALL_RUNS, full=FULL_RUNS)
def gradient_time(task: str, precision: str) -> Row:
    """One gradient computation, forward and backward, of one batch."""
    setup = Setup(task=task, precision=precision, preset=_preset())
    built = training.build_task(setup, device())
    model = built.model.half() if precision == "fp16" else built.model
    batch = next(built.batches(0, 0))
    scaler = training.build_scaler(setup, device())

    def step() -> None:
        model.zero_grad()
        loss, _ = training.forward(setup, built, model, batch)
        (loss if scaler is None else scaler.scale(loss)).backward()

    timing = bench(step)
    return timing.row() | {"peak_gib": peak_memory(step).peak_gib}


@experiment(
    small=[{"million_parameters": 1}],
    full=[{"million_parameters": size} for size in (10, 100, 1000)],
)
def scaler_step(million_parameters: int) -> list[Row]:
    """Unscale, clip and AdamW step: ours, torch's, and no scaler at all, from one interleaved run.

    The floor is what a fused AdamW and one norm must move: 32 bytes a parameter.
    """
    elements = million_parameters * 10**6 // 16
    parameters = [torch.randn(elements, device=device()).requires_grad_() for _ in range(16)]
    scaled = [torch.randn(elements, device=device()) * 2.0**8 for _ in range(16)]
    for parameter in parameters:
        parameter.grad = torch.empty_like(parameter)

    def restore() -> None:
        torch._foreach_copy_([p.grad for p in parameters], scaled)

    ways = {
        "no scaler": partial(_plain_step, parameters),
        "torch.amp.GradScaler": partial(_torch_step, parameters),
        "ours, readable": partial(_our_step, parameters, True),
        "ours": partial(_our_step, parameters, False),
    }
    steps = {name: build() for name, build in ways.items()}
    timed = compare(steps, check=False, before=restore)
    _, copy_gb_per_s = copy(4096 if device().type == "cuda" else 64)
    rows = []
    for name, step in steps.items():
        restore()
        timing = timed.timing(name)
        ratios = {f"ratio_to_{to}": timed.ratio(name, way)[0] for to, way in REFERENCES.items()}
        moved = FLOOR_BYTES * 16 * elements / timing.median_ms / 1e6
        row = {"way": name} | timing.row() | ratios
        rows.append(row | {"share_of_copy": moved / copy_gb_per_s, "host_reads": _host_reads(step)})
    return rows


FLOOR_BYTES = 32
REFERENCES = {"no_scaler": "no scaler", "torch": "torch.amp.GradScaler"}


@experiment(
    small=[{"hidden": 32, "layers": 2, "batch": 8}],
    full=[{"hidden": 512, "layers": 8, "batch": 4096}, {"hidden": 2048, "layers": 8, "batch": 16384}],
)
def autocast_overhead(hidden: int, layers: int, batch: int) -> list[Row]:
    """A training step of a stack of Linear, LayerNorm, GELU without autocast, under torch's and under ours."""
    dtype = torch.bfloat16 if device().type == "cpu" else torch.float16
    blocks = [nn.Sequential(nn.Linear(hidden, hidden), nn.LayerNorm(hidden), nn.GELU()) for _ in range(layers)]
    model = nn.Sequential(*blocks).to(device())
    x = torch.randn(batch, hidden, device=device())
    regions: dict[str, Callable] = {
        "no autocast": lambda: torch.autocast(device().type, enabled=False),
        "torch.autocast": lambda: torch.autocast(device().type, dtype=dtype),
        "ours": lambda: Autocast(dtype=dtype, device_type=device().type),
    }

    def run(region: Callable) -> Tensor:
        model.zero_grad()
        with region():
            loss = model(x).float().pow(2).mean()
        loss.backward()
        return loss.detach()

    timed = compare({name: partial(run, region) for name, region in regions.items()}, tolerance=2e-2)
    return [
        {"way": name} | timed.timing(name).row() | {"ratio_to_torch": timed.ratio(name, "torch.autocast")[0]}
        for name in regions
    ]


class _Enough(Exception):
    """Ends a run that was only looked at."""


LOWEST, HIGHEST = -60, 20  # exponents that are told apart; fp16 ends at -24, with subnormal numbers


def _exponents(values: Tensor) -> Tensor:
    """Counts of values by exponent: place 0 for exact zeros, then LOWEST to HIGHEST."""
    magnitude = values.detach().float().abs()
    exponent = torch.frexp(magnitude).exponent - 1
    places = torch.where(magnitude == 0, 0, exponent.clamp(LOWEST, HIGHEST) - LOWEST + 1)
    return torch.bincount(places.flatten().long(), minlength=HIGHEST - LOWEST + 2)


def _zero_share(grads: list[Tensor]) -> Tensor:
    return sum((g == 0).sum() for g in grads) / sum(g.numel() for g in grads)


def _plain_step(parameters: list[Tensor]) -> Callable[[], None]:
    optimizer = torch.optim.AdamW(parameters, fused=True)

    def step() -> None:
        nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()

    return step


def _torch_step(parameters: list[Tensor]) -> Callable[[], None]:
    optimizer = torch.optim.AdamW(parameters, fused=True)
    scaler = torch.amp.GradScaler(device().type, init_scale=2.0**8)
    scaler.scale(torch.ones((), device=device()))

    def step() -> None:
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(parameters, 1.0)
        scaler.step(optimizer)
        scaler.update()

    return step


def _our_step(parameters: list[Tensor], readable: bool) -> Callable[[], None]:
    optimizer = torch.optim.AdamW(parameters, fused=True)
    scaler = DynamicGradScaler(init_scale=2.0**8, readable=readable)
    scaler.scale(torch.ones((), device=device()))

    def step() -> None:
        scaler.clip_grad_norm_(optimizer, 1.0)
        scaler.step(optimizer)
        scaler.update()

    return step


def _host_reads(step: Callable[[], None]) -> int:
    """How often a step reads a tensor's value on the host, which waits for the GPU."""

    class Counter(TorchDispatchMode):
        reads = 0

        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            self.reads += function._schema.name == "aten::_local_scalar_dense"
            return function(*args, **(kwargs or {}))

    with Counter() as counter:
        step()
    return counter.reads
