"""What autocast adds to a training step: none, torch's, and ours."""

from collections.abc import Callable
from functools import partial
from types import SimpleNamespace

import pandas as pd
import torch
from torch import Tensor, nn

from ...amp import Autocast
from ...book import Worth
from ...book.table import table
from ...book.values import timed
from ...lab import compare, device
from ...lab.machine import missing_because
from ...lab.rows import Row
from .ratios import COLUMNS, TIMED, against, ratio_of, ratio_to

TORCHS, OURS = "torch.autocast", "ours"
LOSS_SCALE = 2.0**12  # lifts the gradients of a mean over millions of outputs into fp16's normal numbers


@table(
    small=[{"hidden": 32, "layers": 2, "batch": 8}],
    cpu=[{"hidden": 512, "layers": 8, "batch": 4096}, {"hidden": 1024, "layers": 4, "batch": 2048}],
    gpu=[{"hidden": 512, "layers": 8, "batch": 16384}, {"hidden": 2048, "layers": 8, "batch": 4096}],
    big_gpu=[{"hidden": 512, "layers": 8, "batch": 65536}, {"hidden": 2048, "layers": 8, "batch": 16384}],
    columns=f"variant dtype {COLUMNS} {ratio_to('torch')}",
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
        TORCHS: partial(torch.autocast, kind, dtype=dtype),
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

    steps = compare({name: partial(run, region) for name, region in regions.items()}, tolerance=2e-2, rounds=30)
    return [
        {"variant": name, "dtype": str(dtype).removeprefix("torch.")}
        | steps.timing(name).row()
        | against(steps, name, TORCHS, "torch")
        for name in regions
    ]


@autocast_overhead.numbers()
def _(rows: pd.DataFrame) -> SimpleNamespace:
    """A step under each autocast; the largest ratio of ours to torch's over the sizes."""
    ours = rows[rows["variant"] == OURS]
    return SimpleNamespace(
        table=timed(rows, ["hidden", "layers", "batch", *TIMED]),
        dtype=rows["dtype"].iloc[0],
        ratio=ratio_of(ours.nlargest(1, "ratio_to_torch"), "ratio_to_torch"),
    )
