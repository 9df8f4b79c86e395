"""What a scaler adds to a step of the optimizer: ours, torch's, and none."""

import math
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace

import pandas as pd
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from ...amp import DynamicGradScaler
from ...book.table import Worth, table
from ...book.values import Number, derived, of_kernels, timed
from ...lab import Row, compare, device
from ...lab.timing import queue_ahead
from .ratios import COLUMNS, TIMED, against, inverse, ratio_of, ratio_to

SCALE = 2.0**8
NO_SCALER, TORCHS, PLAIN, OURS = "no scaler", "torch.amp.GradScaler", "plain operations", "ours"
BUSY_CYCLES = 4_000_000  # about 2 ms of a GPU: Python takes as long to queue a step
REFERENCES = {"no_scaler": NO_SCALER, "torch": TORCHS}


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


@table(
    small=[{"million_parameters": 1}],
    cpu=[{"million_parameters": 24}],
    gpu=[{"million_parameters": size} for size in (10, 100)],
    big_gpu=[{"million_parameters": size} for size in (10, 100, 1000)],
    columns=f"variant host_reads {COLUMNS} {ratio_to('torch')} {ratio_to('no_scaler')}",
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
            row |= against(timed, name, baseline, column)
        rows.append(row)
    return rows


@scaler_step.numbers()
def _(rows: pd.DataFrame) -> SimpleNamespace:
    """A scaled step of each variant, and ours against torch's scaler and against none, for most parameters."""
    sizes = rows["million_parameters"].unique()
    rows = rows.reindex(columns=rows.columns.union(["tensors"], sort=False))  # older rows don't tell
    times = timed(rows, ["million_parameters", "tensors", *TIMED, "ratio_to_no_scaler", "host_reads"])
    ours = rows[(rows["variant"] == OURS) & (rows["million_parameters"] == max(sizes))]
    largest = rows[(rows["million_parameters"] == max(sizes)) & rows["variant"].isin([OURS, TORCHS])]
    name = "a step of scaler and AdamW"
    over_torch = of_kernels(ratio_of(ours, "ratio_to_torch"), name, *largest.to_dict("records"))
    plain = rows[rows["variant"] == PLAIN].sort_values("million_parameters")
    return SimpleNamespace(
        table=times if len(sizes) > 1 else times.drop(columns="million_parameters"),
        plain_us=[Number(1e3 * row["median_ms"] / row["tensors"], "µs", decimals=0) for _, row in plain.iterrows()],
        sizes=", ".join(map(str, sizes)),
        over_torch=over_torch,
        over_none=ratio_of(ours, "ratio_to_no_scaler"),
        torch_over_none=ratio_of(largest[largest["variant"] == TORCHS], "ratio_to_no_scaler"),
        speedup=inverse(over_torch),
        predicted_over_torch=derived(36 / 48, "bytes moved"),
        predicted_over_none=derived(36 / 40, "bytes moved"),
    )
