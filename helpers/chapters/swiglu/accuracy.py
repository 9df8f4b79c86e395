"""The rounding error of each level, in each type, against fp64."""

from collections import defaultdict
from types import SimpleNamespace

import pandas as pd
import torch

from ...book.table import Worth, table
from ...book.values import PERCENT, Number, lacking
from ...lab import Row, device
from ...lab.timing import relative_error
from ...swiglu import MemoryOptimizedSwigluMLP, SwigluMLP
from .layers import train_step
from .sizes import LEVEL, at_each_level

GRADIENTS = ("output", "grad_x", "grad_W", "grad_V", "grad_U")


@table(
    small=at_each_level([{"dtype": "float32"}]),
    cpu=at_each_level([{"dtype": dtype} for dtype in ("float32", "bfloat16")]),
    big_gpu=at_each_level([{"dtype": dtype} for dtype in ("float32", "bfloat16", "float16")]),
    columns=[f"{layer}{tensor}_error" for layer in ("", "plain_") for tensor in GRADIENTS],
    timed=False,
    worth=Worth(2, "the error of each level in each type", cpu=0.6, gpu=1, big_gpu=0.8),
)
def accuracy(dtype: str, checkpoint_level: int) -> Row:
    """Relative error of the output and of each gradient against fp64, and the plain module's in the same type."""
    torch.manual_seed(0)  # the same data for every level
    hidden, intermediate, tokens = (1024, 4096, 2048) if device().type == "cuda" else (64, 256, 128)
    exact = SwigluMLP(hidden, intermediate, device=device(), dtype=torch.float64)
    x = torch.randn(tokens, hidden, device=device(), dtype=torch.float64, requires_grad=True)
    l = torch.randn(tokens, hidden, device=device(), dtype=torch.float64)
    expected = train_step(exact, exact, x, l)()
    low = {"device": device(), "dtype": getattr(torch, dtype)}
    x_low, l_low = x.detach().to(**low).requires_grad_(), l.to(**low)
    plain = SwigluMLP(hidden, intermediate, **low)
    plain.load_state_dict(exact.state_dict())
    ours = MemoryOptimizedSwigluMLP.from_plain(plain, checkpoint_level)
    row: Row = {}
    for name, layer in (("", ours), ("plain_", plain)):
        computed = train_step(layer, layer, x_low, l_low)()
        for tensor, a, b in zip(GRADIENTS, computed, expected, strict=True):
            row[f"{name}{tensor}_error"] = relative_error(a, b)
    return row


@accuracy.numbers()
def _(rows: pd.DataFrame) -> SimpleNamespace:
    """The largest relative errors against fp64 by type: of level 3's gradients, of the exact levels, of plain's."""
    gradients, rounds = GRADIENTS[1:], rows[LEVEL] == 3

    def largest(chosen: pd.DataFrame, prefix: str = "") -> dict[str, Number]:
        errors = chosen.groupby("dtype")[[f"{prefix}{name}_error" for name in gradients]].max().max(axis=1)
        known = {name: Number(error, PERCENT, decimals=2) for name, error in errors.items()}
        return defaultdict(lambda: lacking("errors in that type", PERCENT), known)

    return SimpleNamespace(rounded=largest(rows[rounds]), exact=largest(rows[~rounds]), plain=largest(rows, "plain_"))
