"""A step of AdamW in every variant, against the bandwidth of a copy."""

from types import SimpleNamespace

import pandas as pd
import torch

from ...book.table import Worth, table
from ...lab import Row, compare, device, missing_because
from ...lab.timing import queue_ahead
from ...rush import optimizers
from .bandwidth import TIMES, bandwidth, kernel_rows


@table(
    small=[{"million_parameters": 1}],
    cpu=[{"million_parameters": size} for size in (10, 100)],
    gpu=[{"million_parameters": size} for size in (10, 100)],
    big_gpu=[{"million_parameters": size} for size in (10, 100, 1000)],
    version=2,
    columns=TIMES + "share_of_copy",
    worth=Worth(40, "AdamW beside apex and torch's", cpu=9, gpu=3, big_gpu=5),
)
def adam(million_parameters: int) -> list[Row]:
    """A step of AdamW in every variant, in turn in one process, on 64 parameters of one size.

    The host is a millisecond ahead of the GPU, as in training, where the backward pass is still running. A variant
    whose launches take longer, such as the loop over small parameters, is launch-bound: its time is the host's. The
    others' times are the device's.
    """
    elements = million_parameters * 10**6 // 64
    params = [torch.randn(elements, device=device()).requires_grad_() for _ in range(64)]
    for param in params:
        param.grad = torch.randn_like(param)
    missing = {v: missing_because(*optimizers.NEEDS.get(v, ())) for v in optimizers.VARIANTS}
    steps = {v: optimizers.build_optimizer(v, params).step for v, reason in missing.items() if not reason}
    timed = compare(steps, check=False, before=queue_ahead)
    return kernel_rows(missing, timed, optimizers.LEAST_BYTES * 64 * elements)


@adam.numbers()
def _(rows: pd.DataFrame) -> SimpleNamespace:
    """A step of AdamW by variant."""
    return SimpleNamespace(variants=bandwidth(rows, ["million_parameters"]))
