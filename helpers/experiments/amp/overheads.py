"""The cost of a scaler and of autocast: an optimizer step with each scaler, a training step under each autocast."""

import math
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from ...amp import Autocast, DynamicGradScaler
from ...lab import Comparison, Worth, compare, device, experiment
from ...lab.machine import missing_because
from ...lab.records import Row
from ...lab.timing import queue_ahead

SCALE = 2.0**8

NO_SCALER, TORCHS, PLAIN, OURS = "no scaler", "torch.amp.GradScaler", "plain operations", "ours"
TORCHS_AUTOCAST = "torch.autocast"


def decoder_shapes(million_parameters: float) -> list[tuple[int, ...]]:
    """Shapes of a decoder's weights and biases, together about so many million parameters."""
    hidden = 2 ** round(math.log2(math.sqrt(million_parameters * 1e4)))
    layers = max(round(million_parameters * 1e6 / (12 * hidden**2)), 1)
    matrices = [(3 * hidden, hidden), (hidden, hidden), (4 * hidden, hidden), (hidden, 4 * hidden)]
    norms = [(hidden,)] * 4
    return [shape for _ in range(layers) for shape in (*matrices, *((rows,) for rows, _ in matrices), *norms)]


def scaler_steps(parameters: list[Tensor]) -> dict[str, Callable[[], None]]:
    """Unscale, clip and fused AdamW step of parameters with scaled gradients, by variant."""
    optimizers = {name: torch.optim.AdamW(parameters, fused=True) for name in (NO_SCALER, TORCHS, PLAIN, OURS)}
    torchs, ours = torch.amp.GradScaler(device().type, init_scale=SCALE), DynamicGradScaler(init_scale=SCALE)
    for scaler in (torchs, ours):
        scaler.scale(torch.ones((), device=device()))  # moves its state to the device
    clip = partial(nn.utils.clip_grad_norm_, parameters, 1.0)

    def without_scaler() -> None:
        clip()
        optimizers[NO_SCALER].step()

    def torchs_step() -> None:
        torchs.unscale_(optimizers[TORCHS])
        clip()
        torchs.step(optimizers[TORCHS])
        torchs.update()

    def plain_step() -> None:
        """One gradient after the other; the host waits to know whether to step."""
        for parameter in parameters:
            parameter.grad.div_(SCALE)
        if torch.stack([torch.isfinite(parameter.grad).all() for parameter in parameters]).all().item():
            clip()
            optimizers[PLAIN].step()

    def our_step() -> None:
        ours.clip_grad_norm_(optimizers[OURS], 1.0)
        ours.step(optimizers[OURS])
        ours.update()

    return {NO_SCALER: without_scaler, TORCHS: torchs_step, PLAIN: plain_step, OURS: our_step}


def host_reads(step: Callable[[], None]) -> int:
    """The number of times a step reads a tensor's value on the host, each of which waits for the GPU."""
    return operations(step).count("aten::_local_scalar_dense")


def operations(step: Callable[[], None]) -> list[str]:
    """The names of torch's operations in a step, in order; on a GPU each but a view is one launch or a few."""

    class Names(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            names.append(function._schema.name)
            return function(*args, **(kwargs or {}))

    names: list[str] = []
    with Names():
        step()
    return names


BUSY_CYCLES = 4_000_000  # about 2 ms of a GPU: Python takes as long to queue a step
REFERENCES = {"no_scaler": NO_SCALER, "torch": TORCHS}
TIMED = "median_ms p20_ms p80_ms n"


def _ratio_to(baseline: str) -> str:
    """The columns of a ratio to a baseline."""
    return " ".join(f"ratio_to_{baseline}{end}" for end in ("", "_low?", "_high?", "_pairs?"))


@experiment(
    small=[{"million_parameters": 1}],
    cpu=[{"million_parameters": 24}],
    gpu=[{"million_parameters": size} for size in (10, 100)],
    big_gpu=[{"million_parameters": size} for size in (10, 100, 1000)],
    columns=f"variant host_reads {TIMED} {_ratio_to('torch')} {_ratio_to('no_scaler')}",
    version=4,
    worth=Worth(40, "what a scaler adds to a step, torch's and ours", cpu=15.6, gpu=4, big_gpu=4),
)
def scaler_step(million_parameters: int) -> list[Row]:
    """Unscale, clip and AdamW step: ours, torch's, and no scaler at all, from one interleaved run.

    The parameters have the shapes of a decoder's. Each step is queued while the GPU is busy with something else, as it
    is in training: what is measured is the work of the GPU, and, for a variant that waits for it, the wait.
    """
    shapes = decoder_shapes(million_parameters)
    parameters = [torch.randn(shape, device=device()).requires_grad_() for shape in shapes]
    scaled = [torch.randn(shape, device=device()) * SCALE for shape in shapes]
    for parameter in parameters:
        parameter.grad = torch.empty_like(parameter)

    def restore() -> None:
        torch._foreach_copy_([p.grad for p in parameters], scaled)
        queue_ahead(BUSY_CYCLES)

    steps = scaler_steps(parameters)
    timed = compare(steps, check=False, before=restore, rounds=60 if device().type == "cpu" else 20)
    rows = []
    for name, step in steps.items():
        restore()
        row = {"variant": name, "host_reads": host_reads(step)} | timed.timing(name).row()
        for column, baseline in REFERENCES.items():
            row |= _against(timed, name, baseline, column)
        rows.append(row)
    return rows


def _against(timed: Comparison, variant: str, to: str, name: str) -> Row:
    """A variant's ratio to a baseline with its interval, in columns that name the baseline."""
    row = timed.row(variant, to)
    return {f"ratio_to_{name}": row["ratio"]} | {f"ratio_to_{name}_{end}": row[end] for end in ("low", "high", "pairs")}


LOSS_SCALE = 2.0**12  # lifts the gradients of a mean over millions of outputs into fp16's normal numbers


@experiment(
    small=[{"hidden": 32, "layers": 2, "batch": 8}],
    cpu=[{"hidden": 512, "layers": 8, "batch": 4096}, {"hidden": 1024, "layers": 4, "batch": 2048}],
    gpu=[{"hidden": 512, "layers": 8, "batch": 16384}, {"hidden": 2048, "layers": 8, "batch": 4096}],
    big_gpu=[{"hidden": 512, "layers": 8, "batch": 65536}, {"hidden": 2048, "layers": 8, "batch": 16384}],
    columns=f"variant dtype {TIMED} {_ratio_to('torch')}",
    version=3,
    missing=lambda **_: missing_because("native bf16") if device().type == "cpu" else "",
    worth=Worth(30, "what Autocast adds to a step, torch's and ours", cpu=11.2, gpu=4, big_gpu=3),
)
def autocast_overhead(hidden: int, layers: int, batch: int) -> list[Row]:
    """A training step of a stack of Linear, LayerNorm, GELU without autocast, under torch's and under ours.

    Batches are so large that the GPU takes longer than Python; with small ones it would be Python's time. The loss
    is scaled for all three, for without it most gradients in fp16 are zeros, which a GPU multiplies faster.
    """
    kind = device().type
    dtype = torch.bfloat16 if kind == "cpu" else torch.float16
    regions = {
        "no autocast": partial(torch.autocast, kind, enabled=False),
        TORCHS_AUTOCAST: partial(torch.autocast, kind, dtype=dtype),
        OURS: partial(Autocast, dtype=dtype, device_type=kind),
    }
    blocks = [nn.Sequential(nn.Linear(hidden, hidden), nn.LayerNorm(hidden), nn.GELU()) for _ in range(layers)]
    model = nn.Sequential(*blocks).to(device())
    x = torch.randn(batch, hidden, device=device())

    def run(region: Callable) -> Tensor:
        model.zero_grad()
        with region():
            loss = model(x).float().pow(2).mean()
        (loss * LOSS_SCALE).backward()
        return loss.detach()

    timed = compare({name: partial(run, region) for name, region in regions.items()}, tolerance=2e-2, rounds=30)
    return [
        {"variant": name, "dtype": str(dtype).removeprefix("torch.")}
        | timed.timing(name).row()
        | _against(timed, name, TORCHS_AUTOCAST, "torch")
        for name in regions
    ]
