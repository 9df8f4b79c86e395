"""Launching Triton kernels, and the check whether tensors can use them; otherwise plain torch computes the same.

`triton` and `tl` are None where Triton isn't installed (torch's CUDA builds include it, except on Windows), so the
other files define their kernels under `if triton is not None`.
"""

import torch
from torch import Tensor

try:
    import triton
    import triton.language as tl
except ImportError:
    triton = tl = None

DTYPES = (torch.float16, torch.bfloat16, torch.float32)
AHEAD = 2**16  # bytes of shared memory that a program may use for prefetched blocks


def on_triton(*tensors: Tensor | None) -> bool:
    """Whether the Triton kernels support all of these tensors: on a GPU, in fp32 or half precision."""
    return triton is not None and all(t is None or (t.is_cuda and t.dtype in DTYPES) for t in tensors)


def launch(kernel, programs: int, *arguments, **constants) -> None:
    """Run a kernel on the first tensor's device; Triton itself would take the current one."""
    if programs:
        with torch.cuda.device_of(arguments[0]):
            kernel[(programs,)](*arguments, **constants)


def stages(block_bytes: int) -> int:
    """Triton's `num_stages` for a loop over blocks: 3 prefetches two blocks while one is processed, 1 none."""
    return 1 + min(2, AHEAD // block_bytes)


def as_rows(tensor: Tensor) -> Tensor:
    """(…, width) as (rows, width) with each row contiguous: a view where there is one."""
    rows = tensor.reshape(-1, tensor.shape[-1])
    return rows if rows.stride(1) == 1 else rows.contiguous()


def contiguous(parameter: Tensor | None) -> Tensor | None:
    return None if parameter is None else parameter.contiguous()
