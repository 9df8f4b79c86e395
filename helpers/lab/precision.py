"""The type that matrix products are computed in: what autocast asks for, whether fp32 products use TF32, and fp16
products on a CPU without units for them.

Autocast doesn't cast the inputs of custom autograd functions and hand-written kernels. They ask `autocast_dtype` which
type to compute in, and run their own operations under `without_autocast`.
"""

import contextlib
import functools
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from .machine import device


def autocast_dtype(x: Tensor) -> torch.dtype | None:
    """The type to which autocast, torch's or `helpers.amp.Autocast`, casts a product's input x; None if neither is on.

    Both leave fp64 alone. Costs about a microsecond; `torch.compile` can trace it.
    """
    return _dtype_for(x.device.type) if x.dtype != torch.float64 else None


def without_autocast(x: Tensor) -> contextlib.AbstractContextManager:
    """A context manager that turns off the autocast whose type `autocast_dtype(x)` returns."""
    kind = x.device.type
    return torch.autocast(kind, enabled=False) if _dtype_for(kind) is not None else contextlib.nullcontext()


def _dtype_for(kind: str) -> torch.dtype | None:
    """The type of the region for this kind of device; None outside of one."""
    # torch 2.11's compiler can't trace `is_autocast_available`, nor does it need to.
    has_autocast = torch.compiler.is_compiling() or torch.amp.is_autocast_available(kind)
    return torch.get_autocast_dtype(kind) if has_autocast and torch.is_autocast_enabled(kind) else None


@contextlib.contextmanager
def fp32_products(precision: str = "highest") -> Iterator[None]:
    """Compute fp32 products at torch's precision of that name, and a GPU's convolutions in TF32 if it is "high".

    "highest" is fp32. "high" is TF32 on a GPU. "medium" is oneDNN's fp32 kernel on CPUs without bf16 instructions.
    torch's defaults differ: fp32 for products, TF32 for convolutions. Both settings are restored afterwards.
    """
    cudnn, before = torch.backends.cudnn, (torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32)
    torch.set_float32_matmul_precision(precision)
    cudnn.allow_tf32 = precision == "high"
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before[0])
        cudnn.allow_tf32 = before[1]


class _WideProducts(TorchDispatchMode):
    """Hands products of fp16 numbers to the fp32 kernels; the results are rounded to fp16."""

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        if func not in _products() or not any(isinstance(a, Tensor) and a.dtype == torch.float16 for a in args):
            return func(*args, **(kwargs or {}))
        wide = [a.float() if isinstance(a, Tensor) and a.dtype == torch.float16 else a for a in args]
        output = func(*wide, **(kwargs or {}))
        if isinstance(output, Tensor):
            return output.half()
        narrow = len(output) if func not in _FIRST_OUTPUT else 1  # attention returns its log-sum-exp in fp32
        return tuple(
            o.half() if place < narrow and isinstance(o, Tensor) and o.dtype == torch.float32 else o
            for place, o in enumerate(output)
        )


_aten = torch.ops.aten
_FIRST_OUTPUT = {_aten._scaled_dot_product_flash_attention_for_cpu.default}


@functools.cache
def _products() -> frozenset:
    names = "mm addmm bmm baddbmm linear matmul convolution convolution_backward conv2d scaled_dot_product_attention"
    names += " _scaled_dot_product_flash_attention_for_cpu _scaled_dot_product_flash_attention_for_cpu_backward"
    return frozenset(getattr(_aten, name).default for name in names.split()) | {_aten.conv_transpose2d.input}


def fp16_by_fp32() -> contextlib.AbstractContextManager:
    """On a CPU, compute products, convolutions and attention of fp16 numbers by fp32 kernels, and round to fp16.

    As tensor cores do: inputs and results in fp16, sums in fp32, so what fp16 loses is the same. A CPU without fp16
    units is an order of magnitude slower by torch's own fp16 kernels; chapter 1 times both. Does nothing on a GPU.
    """
    return _WideProducts() if device().type == "cpu" else contextlib.nullcontext()
