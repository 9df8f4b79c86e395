"""LayerNorm and RMSNorm, forward and backward, in every variant, against the bandwidth of a copy."""

from collections.abc import Callable
from functools import partial
from types import SimpleNamespace

import pandas as pd
import torch
from torch import Tensor

from ...book.table import Worth, table
from ...book.values import over, pick
from ...kernels import swaps
from ...lab import Row, compare, device, missing_because
from ...lab.timing import queue_ahead
from .bandwidth import TIMES, bandwidth, kernel_rows

KINDS = {"kind": {"layer": "LayerNorm", "rms": "RMSNorm"}}


def _each_kind(*shapes: tuple[int, int, str]) -> list[Row]:
    return [
        {"kind": kind, "rows": rows, "width": width, "dtype": dtype}
        for kind in swaps.KINDS
        for rows, width, dtype in shapes
    ]


@table(
    small=_each_kind((64, 64, "float32")),
    # in fp32: a CPU adds up the gradient of torch's weights in their own type, and bf16 loses a tenth of it
    cpu=_each_kind((2048, 2048, "float32")),
    gpu=_each_kind(*((*shape, t) for shape in ((16384, 2048), (65536, 1024)) for t in ("float16", "bfloat16"))),
    big_gpu=_each_kind((16384, 2048, "bfloat16"), (16384, 4096, "bfloat16"), (65536, 1024, "bfloat16")),
    version=2,
    columns=TIMES + "share_of_copy",
    worth=Worth(30, "norms beside apex and Liger", cpu=3.8, gpu=2, big_gpu=5),
)
def norms(kind: str, rows: int, width: int, dtype: str) -> list[Row]:
    """Forward and backward of a norm in every variant, in turn in one process; shares are of the copy's bandwidth.

    The host is a millisecond ahead of the GPU, so that kernels are timed and not their launches, which take longer.
    """
    factory = {"device": device(), "dtype": getattr(torch, dtype)}
    x = torch.randn(rows, width, **factory, requires_grad=True)
    weight = torch.randn(width, **factory, requires_grad=True)
    bias = torch.randn(width, **factory, requires_grad=True) if kind == "layer" else None
    gradient = torch.randn_like(x)
    inputs = [tensor for tensor in (x, weight, bias) if tensor is not None]

    def both(compute: Callable[..., Tensor]) -> list[Tensor]:
        out = compute(x, weight, bias)
        return [out.detach(), *torch.autograd.grad(out, inputs, gradient)]

    missing = {variant: missing_because(*swaps.needs(variant)) for variant in swaps.VARIANTS}
    steps = {v: partial(both, swaps.norm(v, kind)) for v, reason in missing.items() if not reason}
    timed = compare({swaps.TORCH: steps[swaps.TORCH]} | steps, before=queue_ahead)
    return kernel_rows(missing, timed, sum(swaps.least_bytes(x.numel(), x.element_size())))


@norms.numbers()
def _(rows: pd.DataFrame) -> SimpleNamespace:
    """LayerNorm and RMSNorm by variant, at the widest; rows and width are columns only where there are several."""
    rows = rows[rows["width"] == rows["width"].max()]
    times = bandwidth(rows, ["kind", "rows", "width"])
    times = times.assign(**{"peak, GiB": rows["peak_gib"]}) if "peak_gib" in rows else times  # a CPU's have none
    shown = _varied(times, ["rows", "width"]).replace(KINDS)
    sizes = ", ".join(f"{name} {rows[name].iloc[0]}" for name in ("rows", "width") if name not in shown)
    layer = rows[rows["kind"] == "layer"]
    torchs, ours, apex = (pick(layer, "median_ms", "ms", variant=of) for of in (swaps.TORCH, "triton", "apex"))
    return SimpleNamespace(variants=shown, sizes=sizes, ours=over(ours, torchs), apex=over(apex, torchs))


def _varied(shown: pd.DataFrame, names: list[str]) -> pd.DataFrame:
    """Without those of the columns that hold one value."""
    return shown.drop(columns=[name for name in names if name in shown and shown[name].nunique() == 1])
