"""Time and peak memory of stacks of layers at each level, by shape."""

import itertools
import math
import time
from functools import partial
from types import SimpleNamespace

import pandas as pd
import torch
from torch import nn

from ...book.table import Worth, numbers_of, table
from ...book.values import PERCENT, Number, derived, marked, quiet
from ...lab import Row, device, peak_memory, phases
from ...lab.device_share import as_column, share
from ...lab.memory import GIB
from ...lab.timing import Timing
from ...swiglu import MemoryOptimizedSwigluMLP
from .derived_costs import least_and_most, peak_bytes
from .layers import check_layer
from .sizes import LEVEL, NAMES, at_each_level, shapes

LONG = 5e11  # operations of a pass
STACK = "batch seq_len hidden_dim intermediate_size num_layers dtype"
SWEEP_TASK = shapes(  # the task's shapes, in the task's fp32
    STACK,
    (16, 128, 512, 2048, 2, "float32"),
    (32, 128, 512, 2048, 2, "float32"),
    (8, 512, 1024, 4096, 3, "float32"),
    (16, 512, 1024, 4096, 3, "float32"),
    (4, 1024, 4096, 16384, 5, "float32"),
)
SWEEP_CPU = SWEEP_TASK + shapes(  # the task's third with a quarter of the batch, too; then one thing grows at a time
    STACK,
    (2, 512, 1024, 4096, 3, "float32"),
    *((2, seq_len, 512, 2048, 4, "bfloat16") for seq_len in (128, 256, 1024)),
    *((2, 256, hidden, 4 * hidden, 4, "bfloat16") for hidden in (256, 1024)),
    *((2, 256, 512, 2048, layers, "bfloat16") for layers in (2, 8)),
)
SWEEP_GPU = SWEEP_TASK[:3] + shapes(  # one thing grows at a time, within 8 GB; fp16, as not each has bf16 units
    STACK,
    *((4, seq_len, 1024, 4096, 8, "float16") for seq_len in (512, 1024, 2048)),
    *((4, 1024, hidden, 4 * hidden, 8, "float16") for hidden in (512, 2048)),
    *((4, 1024, 1024, 4096, layers, "float16") for layers in (2, 4, 16)),
)
SWEEP_BIG_GPU = SWEEP_TASK + shapes(  # one thing grows at a time
    STACK,
    *((8, seq_len, 2048, 8192, 8, "bfloat16") for seq_len in (512, 1024, 2048, 4096, 8192)),
    *((8, 2048, hidden, 4 * hidden, 8, "bfloat16") for hidden in (512, 1024, 4096)),
    *((8, 2048, 2048, 8192, layers, "bfloat16") for layers in (2, 4, 16)),
    *((16, 4096, 2048, 8192, layers, "bfloat16") for layers in (48, 80)),  # more than an H200 holds at level 0, then 2
)


@table(
    small=at_each_level(shapes(STACK, *((2, 32, 64, 256, layers, "float32") for layers in (2, 4)))),
    cpu=at_each_level(SWEEP_CPU),
    gpu=at_each_level(SWEEP_GPU),
    big_gpu=at_each_level(SWEEP_BIG_GPU),
    columns=(
        *(f"{part}{spread}_s" for part in ("forward", "backward") for spread in ("", "_p20", "_p80")),
        *("n", "peak_gib"),
    ),
    worth=Worth(
        4,
        "time and stored bytes of each level by size",
        cpu=6.6,
        gpu=2,
        big_gpu=2,
        headline={"dtype": ("float32",)},
        on_gpu=9,
    ),
)
def sweep(
    batch: int,
    seq_len: int,
    hidden_dim: int,
    intermediate_size: int,
    num_layers: int,
    dtype: str,
    checkpoint_level: int,
) -> Row:
    """Forward and backward time and peak memory of a stack of layers, for each level.

    Gradients persist between steps, as in the task; the loss's gradient is a random tensor. A stack that takes a CPU
    seconds gets one pass, in which its memory is measured, too.
    """
    check_layer(hidden_dim, intermediate_size, dtype, checkpoint_level)
    factory = {"device": device(), "dtype": getattr(torch, dtype)}
    layer = partial(MemoryOptimizedSwigluMLP, hidden_dim, intermediate_size, checkpoint_level, **factory)
    stack = nn.Sequential(*(layer() for _ in range(num_layers)))
    x = torch.randn(batch, seq_len, hidden_dim, **factory, requires_grad=True)
    l = torch.randn(batch, seq_len, hidden_dim, **factory)

    def step():
        y = stack(x)
        yield "forward"
        y.backward(l)
        yield "backward"

    on_gpu, operations = device().type == "cuda", 18 * x.numel() * intermediate_size * num_layers
    if not on_gpu and operations > LONG:
        for weight in (x, *stack.parameters()):
            weight.grad = torch.zeros_like(weight)
        marks = [time.perf_counter()]
        peak = peak_memory(lambda: marks.extend(time.perf_counter() for _ in step()))
        passes = zip(("forward", "backward"), itertools.pairwise(marks), strict=True)
        times = {name: Timing.of([1e3 * (end - begin)]) for name, (begin, end) in passes}
    else:
        times = phases(step, warmup=2, repeat=8 if on_gpu else 20)
        peak = peak_memory(lambda: list(step()))
    row: Row = {"n": times["forward"].n, "peak_gib": peak.peak_gib}
    for name, timing in times.items():
        row |= {f"{name}_s": timing.median_ms / 1e3}
        row |= {f"{name}_p20_s": timing.p20_ms / 1e3, f"{name}_p80_s": timing.p80_ms / 1e3}
    busy_ms = [timing.median_ms * timing.device_share for timing in times.values() if timing.device_share]
    if busy_ms:
        row |= as_column(share(sum(busy_ms), sum(timing.median_ms for timing in times.values())))
    return row


# Numbers

SHAPE = ["batch", "seq_len", "hidden_dim", "num_layers", "intermediate_size"]
GROWING = {"seq_len": "sequence length", "hidden_dim": "width d, I = 4d", "num_layers": "layers"}


@sweep.numbers()
def _(rows: pd.DataFrame) -> SimpleNamespace:
    """Steps of stacks in fp32: a row a shape, and how far the levels lie from level 0.

    `apart` is the largest difference of a level's lower peak from the one that its allocations give, of that.
    """
    task = rows[rows["dtype"] == "float32"]
    lines, apart = [], []
    for (batch, length, hidden, layers, intermediate), of_shape in task.groupby(SHAPE, sort=False):
        levels = of_shape.sort_values(LEVEL).to_dict("records")
        line = {"batch": batch, "sequence": length, "d": hidden, "layers": layers, "passes": int(levels[0]["n"])}
        line["forward, s"] = marked(levels[0]["forward_s"], levels[0])
        line |= {f"backward {row[LEVEL]}, s": marked(row["backward_s"], row) for row in levels}
        lines.append(line | {f"peak {row[LEVEL]}, GiB": row["peak_gib"] for row in levels})
        shape = (batch * length, hidden, intermediate, layers, 4)
        for row in levels[1:]:
            saved = (peak_bytes(0, *shape) - peak_bytes(int(row[LEVEL]), *shape)) / GIB
            apart.append(abs((levels[0]["peak_gib"] - row["peak_gib"]) / saved - 1))
    by_level = {level: task[task[LEVEL] == level].set_index(SHAPE) for level in (0, 1, 2)}
    return SimpleNamespace(
        table=pd.DataFrame(lines),
        apart=Number(max(apart, default=math.nan), PERCENT, missing="stacks in fp32"),
        level1=_against(by_level[0], by_level[1]),
        level2=_against(by_level[0], by_level[2]),
        predicted=derived(8 / 6 - 1, "eight products for six", PERCENT, 0),
    )


def _against(base: pd.DataFrame, level: pd.DataFrame) -> SimpleNamespace:
    """By how much a level's peak is lower, its backward longer; times beside noise or of one pass don't count."""
    base_s, level_s = (quiet(of[of["n"] > 1])["backward_s"] for of in (base, level))
    return SimpleNamespace(
        lower=least_and_most(1 - level["peak_gib"] / base["peak_gib"]), longer=least_and_most(level_s / base_s - 1)
    )


@numbers_of([sweep])
def growth(rows: pd.DataFrame) -> SimpleNamespace:
    """The peak of a step against each of length, width and depth, the other two as in most rows."""
    dtype = next(name for name in NAMES if (rows["dtype"] == name).any())
    stacks = rows[rows["dtype"] == dtype]
    base = stacks[list(GROWING)].mode().iloc[0]
    panels = {}
    for column, title in GROWING.items():
        fixed = [name for name in GROWING if name != column]
        panel = stacks[(stacks[fixed] == base[fixed]).all(axis=1)].sort_values(column)
        panels[title] = panel.assign(x=panel[column], peak_mib=panel["peak_gib"] * 1024)
    return SimpleNamespace(panels=panels, dtype=NAMES[dtype])
