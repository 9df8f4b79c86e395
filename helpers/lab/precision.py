"""What matrix products are computed in: the type that autocast asks for, and whether fp32 keeps fp32 inside.

Operations that cast for themselves (custom autograd functions, hand-written kernels) see tensors as they are. They
ask `autocast_dtype` what to compute in, and run their insides under `without_autocast`.
"""

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor


def autocast_dtype(x: Tensor) -> torch.dtype | None:
    """The type in which autocast, torch's or `helpers.amp.Autocast`, wants a product with x; None if neither is on.

    Both leave fp64 alone. Costs about a microsecond, and can be traced by a compiler.
    """
    if (mode := casting_mode()) is not None and (dtype := mode.product_dtype(x)) is not None:
        return dtype
    return _torchs_dtype(x.device.type) if x.dtype != torch.float64 else None


def without_autocast(x: Tensor) -> contextlib.AbstractContextManager:
    """A context in which the autocast that `autocast_dtype(x)` answers for is off."""
    if (mode := casting_mode()) is not None and mode.product_dtype(x) is not None:
        return mode.suspended()
    kind = x.device.type
    return torch.autocast(kind, enabled=False) if _torchs_dtype(kind) is not None else contextlib.nullcontext()


def casting_mode() -> Any | None:
    """The mode of the `helpers.amp.Autocast` region that this thread is in: it has `product_dtype` and `suspended`.

    torch's own stack of function modes is asked, because backward takes that along to its threads. A compiler sees
    none: our Autocast refuses to be compiled.
    """
    if torch.compiler.is_compiling():
        return None
    for at in reversed(range(torch._C._len_torch_function_stack())):
        mode = torch._C._get_function_stack_at(at)
        if hasattr(mode, "product_dtype"):
            return mode
    return None


def _torchs_dtype(kind: str) -> torch.dtype | None:
    """What a region of `torch.autocast` for this kind of device casts to; None outside of one."""
    # torch 2.11's compiler can't trace the question whether a kind of device has autocast at all, and need not.
    has_autocast = torch.compiler.is_compiling() or torch.amp.is_autocast_available(kind)
    return torch.get_autocast_dtype(kind) if has_autocast and torch.is_autocast_enabled(kind) else None


@contextlib.contextmanager
def fp32_products(tf32: bool = False) -> Iterator[None]:
    """Products and convolutions of fp32 numbers on a GPU keep fp32 inside, or are rounded to TF32 if that is asked for.

    torch's defaults differ: products keep fp32, convolutions don't. Both are as they were afterwards.
    """
    cudnn, before = torch.backends.cudnn, (torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32)
    torch.set_float32_matmul_precision("high" if tf32 else "highest")
    cudnn.allow_tf32 = tf32
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before[0])
        cudnn.allow_tf32 = before[1]
