"""Where a kernel runs: on a GPU that Triton writes code for. Elsewhere plain torch computes the same."""

import functools
import importlib.util

import torch
from torch import Tensor

DTYPES = (torch.float16, torch.bfloat16, torch.float32)


@functools.cache
def has_triton() -> bool:
    """Whether Triton is there; builds of torch for CUDA bring it, but not on Windows."""
    return importlib.util.find_spec("triton") is not None


def on_triton(*tensors: Tensor | None) -> bool:
    """Whether all of these tensors are such that the Triton kernels take them."""
    return has_triton() and all(t is None or (t.is_cuda and t.dtype in DTYPES) for t in tensors)


def launch(kernel, programs: int, *arguments, **constants) -> None:
    """Run a kernel on the first tensor's device; Triton itself would take the current one."""
    if programs:
        with torch.cuda.device_of(arguments[0]):
            kernel[(programs,)](*arguments, **constants)


def processors(tensor: Tensor) -> int:
    """The multiprocessors of the tensor's GPU; a small number on the CPU, where the interpreter takes them in turn."""
    return torch.cuda.get_device_properties(tensor.device).multi_processor_count if tensor.is_cuda else 2
