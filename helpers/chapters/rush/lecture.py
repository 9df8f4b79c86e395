"""The lecture's stack of decoder layers: mixed precision, then a fused norm and optimizer in place of torch's."""

from collections.abc import Callable
from types import SimpleNamespace

import pandas as pd
import torch
from torch import Tensor, nn

from ...book.table import Worth, table
from ...book.values import TIMES as FACTOR
from ...book.values import Number, timed
from ...kernels import swaps
from ...lab import STATUS, Row, compare, device, half_dtype, missing_because, peak_memory
from ...lab.memory import GIB
from ...rush import optimizers
from .bandwidth import TIMES

# The lecture's two tables: row -> whether under autocast, norm and optimizer.
LECTURE = {
    "fp32": (False, swaps.TORCH, optimizers.FOR_LOOP),
    "AMP": (True, swaps.TORCH, optimizers.FOR_LOOP),
    "AMP + fused norm": (True, swaps.OURS, optimizers.FOR_LOOP),
    "AMP + fused Adam": (True, swaps.TORCH, optimizers.FUSED),
    "AMP + both": (True, swaps.OURS, optimizers.FUSED),
}


@table(
    small=[{"batch": 4, "width": 32, "layers": 1}],
    cpu=[],  # there is no fused norm
    gpu=[{"batch": size, "width": 256, "layers": 4} for size in (64, 128)],
    big_gpu=[{"batch": 2048, "width": 256, "layers": 4}],
    columns=TIMES + "ratio_to_fp32 peak_gib",
    worth=Worth(30, "the lecture's table", cpu=15.8, gpu=6, big_gpu=6),
)
def lecture(batch: int, width: int, layers: int) -> list[Row]:
    """Training steps of `nn.TransformerDecoderLayer`s in fp32, with AMP, and with LayerNorms and Adam replaced.

    Python takes some 25 ms for a step of 4 layers: a GPU needs a batch that takes longer in each row.
    """
    x = torch.randn(batch, 64, width, device=device())
    steps: dict[str, Callable[[], Tensor]] = {}
    rows = {}
    for name, (mixed, norm, optimizer) in LECTURE.items():
        half = ["native bf16"] if mixed and device().type == "cpu" else []
        reason = missing_because(*half, *swaps.needs(norm), *optimizers.NEEDS.get(optimizer, ()))
        rows[name] = {"variant": name} | ({STATUS: f"not here: {reason}"} if reason else {})
        if not reason:
            steps[name] = decoder_step(x, layers, half_dtype() if mixed else None, norm, optimizer)
    timed = compare(steps, check=False)
    for name, step in steps.items():
        rows[name] |= timed.timing(name).row() | {"ratio_to_fp32": timed.ratio(name, "fp32")[0]}
        rows[name]["peak_gib"] = peak_memory(step).added_bytes / GIB
    return list(rows.values())


def decoder_step(x: Tensor, layers: int, dtype: torch.dtype | None, norm: str, optimizer: str) -> Callable[[], Tensor]:
    """A training step on x (B, T, C), which is also every layer's memory, with the mean square as the loss."""
    torch.manual_seed(0)
    width = x.shape[-1]
    blocks = [nn.TransformerDecoderLayer(width, 8, 4 * width, dropout=0.0, batch_first=True) for _ in range(layers)]
    model = nn.ModuleList(blocks).to(device())
    swaps.swap_norms(model, norm)
    adamw = optimizers.build_optimizer(optimizer, list(model.parameters()))

    def step() -> Tensor:
        with torch.autocast(device().type, dtype=dtype or torch.bfloat16, enabled=dtype is not None):
            hidden = x
            for block in model:
                hidden = block(hidden, x)
        loss = hidden.float().square().mean()
        loss.backward()
        adamw.step()
        adamw.zero_grad()
        return loss.detach()

    return step


@lecture.numbers()
def _(rows: pd.DataFrame) -> SimpleNamespace:
    """The lecture's stack of decoder layers, against fp32."""
    speedup = [Number(1 / ratio, FACTOR, decimals=2) for ratio in rows["ratio_to_fp32"]]
    names = ["batch", "variant", "median_ms", "p20_ms", "p80_ms", "speedup", "peak_gib"]
    return SimpleNamespace(stack=timed(rows.assign(speedup=speedup), names))
