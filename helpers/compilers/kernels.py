"""Number of kernels that a call runs, from torch's profiler, and the bytes that they move, from their arguments.

A kernel is a pass over memory. On CUDA these are the profiler's kernel events, without the driver's copies and fills.
On the CPU there is no such event, so a kernel is

- a function that inductor generated: it is in the profile as `cpp_fused_…` if it was compiled within
  `inductor_schedule()`;
- a torch operation that does work and contains no such operation: by its schema it returns a new tensor or writes into
  an argument, and isn't an allocation. Views and `item` don't count; `aten::mean` doesn't either, but the `aten::sum`
  and `aten::div_` inside of it do. Fills and copies inside of an operation, such as zeroing a sum's result, are part of
  it.

Note: a `_foreach` operation is one kernel on CUDA (a few for a long list), but on the CPU a loop over the plain
operation, so one kernel a tensor. A generated C++ function with several loops counts as one kernel; so does a fused
optimizer on the CPU, with its loop over tensors.

Bytes are lower bounds for each kernel: every argument read once, every result written once, regardless of caches. A
matrix product that reads a tile several times counts its operands once.
"""

import contextlib
import math
import re
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.autograd.profiler_util import FunctionEvent
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from ..lab.operators import works, writes
from ..lab.timing import synchronize
from . import capture

GENERATED = "cpp_fused_"
_PREPARE = {f"aten::{op}" for op in ("copy_", "_to_copy", "clone", "fill_", "zero_", "zeros", "ones", "full")}
_WRITE_ONLY = ("copy_", "fill_", "zero_", "normal_", "uniform_", "bernoulli_", "exponential_", "random_")


def kernel_names(fn: Callable[[], Any]) -> list[str]:
    """The names of the kernels that `fn()` runs, in order. Call `fn` once before: a first call compiles and tunes."""
    on_gpu, kinds = torch.cuda.is_available(), torch.profiler.ProfilerActivity
    with torch.profiler.profile(activities=[kinds.CPU, kinds.CUDA] if on_gpu else [kinds.CPU]) as profile:
        fn()
        synchronize()
    events = profile.events()
    if on_gpu:  # without the driver's copies and fills, and without `record_function` ranges
        on_device = [e for e in events if e.device_type == torch.autograd.DeviceType.CUDA and not e.is_user_annotation]
        return [event.name for event in on_device if not event.name.startswith(("Memcpy ", "Memset "))]
    outermost = (event for event in events if event.cpu_parent is None)
    # `graph_7_cpp_fused_add_0` begins with the process-wide number of the graph
    return [re.sub(rf".*(?={GENERATED})", "", name) for event in outermost for name in _passes(event)]


def _passes(event: FunctionEvent) -> list[str]:
    """The kernels of a CPU event: those inside of it, or itself."""
    inside = [name for child in event.cpu_children for name in _passes(child)]
    if not (GENERATED in event.name or works(event.name)):
        return inside
    return [name for name in inside if name not in _PREPARE] or [event.name]


class _Traffic(TorchDispatchMode):
    """Adds up the bytes that each operation below autograd reads and writes."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        result = func(*args, **(kwargs or {}))
        schema = func._schema
        if not works(schema.name) or not writes(schema):  # `works` is true if any overload writes; check this one
            return result
        operation = schema.name.partition("::")[2]
        read, written = [], []
        values = list(args) + [None] * (len(schema.arguments) - len(args))
        for argument, value in zip(schema.arguments, values, strict=True):
            value = (kwargs or {}).get(argument.name, value)
            is_written = argument.alias_info is not None and argument.alias_info.is_write
            if argument.name == "grads" and operation.startswith("_fused_"):
                is_written = False  # without a scaler's `grad_scale`, they are only read
            written += tree_leaves(value) if is_written else []
            read += [] if is_written and (argument.kwarg_only or operation in _WRITE_ONLY) else tree_leaves(value)
        results = (result,) if len(schema.returns) == 1 else tuple(result or ())
        for described, value in zip(schema.returns, results, strict=True):
            written += tree_leaves(value) if described.alias_info is None else []
        self.bytes += nbytes(read) + nbytes(written)
        return result


def nbytes(tensors: list[Any]) -> int:
    """Bytes of the distinct tensors in a list; of an expanded tensor, of its memory. Other objects count 0."""
    distinct = {(t.data_ptr(), t.shape, t.stride()): t for t in tensors if isinstance(t, Tensor)}
    return sum(
        tensor.element_size() * math.prod(size for size, step in zip(shape, strides, strict=True) if step or size == 0)
        for (_, shape, strides), tensor in distinct.items()
    )


def eager_bytes(fn: Callable[[], Any]) -> int:
    """Bytes that the operations of `fn()` move: arguments read, results written. Views and allocations are free.

    Triton kernels that are launched directly aren't torch operations, and aren't counted.
    """
    with _Traffic() as traffic:
        fn()
    return traffic.bytes


@contextlib.contextmanager
def inductor_schedule() -> Iterator[list[int]]:
    """A context in which inductor generates all code anew, with kernels that have names in CPU profiles too.

    Yields a list to which the bytes of each scheduled kernel or library call are appended, as inductor's scheduler
    counts them: each buffer that is read or written once, at most its size; buffers inside of a kernel count 0.
    """
    from torch._inductor import config
    from torch._inductor.graph import GraphLowering

    scheduled: list[int] = []
    generate = GraphLowering.codegen

    def codegen(graph: Any) -> Any:
        code = generate(graph)
        scheduled.extend(map(_scheduled_bytes, graph.scheduler.nodes))
        return code

    capture.forget_compiled()
    # Code from the cache would come without its schedule.
    with (
        capture.silent(),
        torch.compiler.config.patch(force_disable_caches=True),
        config.patch({"cpp.enable_kernel_profile": True}),
        mock.patch.object(GraphLowering, "codegen", codegen),
    ):
        yield scheduled


def _scheduled_bytes(node: Any) -> int:
    """The bytes of a scheduled kernel, by the scheduler.

    A foreach kernel has a part for each tensor, and the parts' bytes are added up: the scheduler's count for the full
    kernel would include buffers that are internal to a fused part.
    """
    from torch._inductor.scheduler import ForeachKernelSchedulerNode

    parts = node.snodes if isinstance(node, ForeachKernelSchedulerNode) else [node]
    return sum(part.get_read_write_buffers_sizes() for part in parts)
