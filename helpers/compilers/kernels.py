"""How many kernels a call runs, by torch's profiler, and how many bytes those kernels move, by their arguments.

A kernel is a pass over memory. On CUDA it is what the profiler files as one: copies and fills by the driver don't
count. On the CPU there is no such event, so a kernel is

- a function that inductor generated: it is in the profile as `cpp_fused_…` where it was compiled within
  `inductor_schedule()`;
- an operation of torch's that does work and has no such operation inside: by its schema it returns a new tensor or
  writes into an argument, and isn't an allocation. Views, `item` and their like don't count; `aten::mean` doesn't, for
  the `aten::sum` and `aten::div_` inside of it do. Fills and copies inside of an operation are its own, as that of the
  sum's result by zeros.

Counts that may surprise: a `_foreach` operation is one kernel a list on CUDA (a few, where the list is long), and on
the CPU a loop over the plain operation, hence one a tensor. A generated C++ function may hold several loops, one after
the other, and counts as one; so does a fused optimizer on the CPU, with its loop over tensors.

Bytes are counted by what each kernel reads and writes at least: every argument once, every result once, whatever the
cache makes of it. A matrix product that reads a tile several times counts its operands once.
"""

import contextlib
import functools
import math
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.autograd.profiler_util import FunctionEvent
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from helpers.lab.timing import synchronize

from . import capture

GENERATED = "cpp_fused_"
_FREE = ("empty", "new_empty", "resize", "set_", "_unsafe_view")  # allocate, or view without saying so
_PREPARE = {f"aten::{op}" for op in ("copy_", "_to_copy", "clone", "fill_", "zero_", "zeros", "ones", "full")}
_WRITE_ONLY = ("copy_", "fill_", "zero_", "normal_", "uniform_", "bernoulli_", "exponential_", "random_")


def kernel_names(fn: Callable[[], Any]) -> list[str]:
    """The names of the kernels that `fn()` runs, in order. Run `fn` before: a first call compiles and chooses."""
    activities = [torch.profiler.ProfilerActivity.CPU]
    if torch.cuda.is_available():
        activities.append(torch.profiler.ProfilerActivity.CUDA)
    with torch.profiler.profile(activities=activities) as profile:
        fn()
        synchronize()
    events = profile.events()
    if torch.cuda.is_available():
        return [event.name for event in events if _is_device_kernel(event)]
    outermost = (event for event in events if event.cpu_parent is None)
    return [_without_graph(name) for event in outermost for name in _passes(event)]


def _is_device_kernel(event: FunctionEvent) -> bool:
    """Also on the device's line are the driver's copies and fills, and the spans of `record_function`."""
    on_device = event.device_type == torch.autograd.DeviceType.CUDA
    return on_device and not event.is_user_annotation and not event.name.startswith(("Memcpy ", "Memset "))


def _without_graph(name: str) -> str:
    """`graph_7_cpp_fused_add_0` without the number of graphs that the process had compiled before."""
    return name[name.index(GENERATED) :] if GENERATED in name else name


def _passes(event: FunctionEvent) -> list[str]:
    """The kernels of a host event: those inside of it, or itself."""
    inside = [name for child in event.cpu_children for name in _passes(child)]
    if not (GENERATED in event.name or _works(event.name)):
        return inside
    return [name for name in inside if name not in _PREPARE] or [event.name]


@functools.cache
def _works(name: str) -> bool:
    """Whether an operation of this name, `aten::add` say, does work by its schemas."""
    space, _, operation = name.partition("::")
    if not operation or operation.startswith(_FREE):
        return False
    try:
        packet = getattr(getattr(torch.ops, space), operation)
    except (AttributeError, RuntimeError):  # an annotation
        return False
    overloads = [getattr(packet, overload) for overload in packet.overloads()]
    return any(_writes(op._schema) for op in overloads if torch.Tag.inplace_view not in op.tags)


def _writes(schema: Any) -> bool:
    into = any(argument.alias_info is not None and argument.alias_info.is_write for argument in schema.arguments)
    new = any(result.alias_info is None and "Tensor" in str(result.type) for result in schema.returns)
    return into or new


class _Traffic(TorchDispatchMode):
    """Adds up what each operation below autograd reads and writes."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        result = func(*args, **(kwargs or {}))
        schema = func._schema
        if not _works(schema.name) or not _writes(schema):  # of the operation's other overloads one may
            return result
        operation = schema.name.partition("::")[2]
        read, written = [], []
        given = list(args) + [None] * (len(schema.arguments) - len(args))
        for argument, value in zip(schema.arguments, given, strict=True):
            value = (kwargs or {}).get(argument.name, value)
            writes = argument.alias_info is not None and argument.alias_info.is_write
            if argument.name == "grads" and operation.startswith("_fused_"):
                writes = writes and (kwargs or {}).get("grad_scale") is not None  # else they are only read
            written += tree_leaves(value) if writes else []
            read += [] if writes and (argument.kwarg_only or operation in _WRITE_ONLY) else tree_leaves(value)
        for described, value in zip(schema.returns, _as_tuple(result, len(schema.returns)), strict=True):
            written += tree_leaves(value) if described.alias_info is None else []
        self.bytes += nbytes(read) + nbytes(written)
        return result


def _as_tuple(result: Any, count: int) -> tuple[Any, ...]:
    return (result,) if count == 1 else tuple(result or ())


def nbytes(tensors: list[Any]) -> int:
    """Bytes of the tensors in a list, each once; of an expanded one what is there. What is no tensor counts nothing."""
    different = {(t.data_ptr(), t.shape, t.stride()): t for t in tensors if isinstance(t, Tensor)}
    return sum(t.element_size() * _elements(t) for t in different.values())


def _elements(tensor: Tensor) -> int:
    return math.prod(size for size, stride in zip(tensor.shape, tensor.stride(), strict=True) if stride or size == 0)


def eager_bytes(fn: Callable[[], Any]) -> int:
    """Bytes that the operations of `fn()` move: arguments read, results written. Views and allocations are free.

    What isn't an operation of torch's, as a Triton kernel that is launched by hand, isn't seen.
    """
    with _Traffic() as traffic:
        fn()
    return traffic.bytes


@contextlib.contextmanager
def inductor_schedule() -> Iterator[list[tuple[str, int]]]:
    """Within it inductor generates code anew, whose kernels have names in a profile on the CPU too.

    Yields a list that each generated kernel, or call of a library's, is appended to: the names of its parts, and the
    bytes that it moves as inductor's scheduler counts them: each buffer that is read or written once, at most its
    size; what stays inside of a kernel counts nothing.
    """
    from torch._inductor import config
    from torch._inductor.graph import GraphLowering

    scheduled: list[tuple[str, int]] = []
    generate = GraphLowering.codegen

    def codegen(graph: Any) -> Any:
        code = generate(graph)
        scheduled.extend((node.get_name(), _scheduled_bytes(node)) for node in graph.scheduler.nodes)
        return code

    capture.forget_compiled()
    # From a cache the code would come without its schedule.
    with (
        capture.silent(),
        torch.compiler.config.patch(force_disable_caches=True),
        config.patch({"cpp.enable_kernel_profile": True}),
        mock.patch.object(GraphLowering, "codegen", codegen),
    ):
        yield scheduled


def _scheduled_bytes(node: Any) -> int:
    """The bytes of a scheduled kernel, by the scheduler.

    A kernel of a list holds a part for each tensor, often fused ones, and each part runs in blocks of its own: theirs
    are added up. The scheduler's sum for the whole takes for written what stays inside of a fused part.
    """
    from torch._inductor.scheduler import ForeachKernelSchedulerNode

    parts = node.snodes if isinstance(node, ForeachKernelSchedulerNode) else [node]
    return sum(part.get_read_write_buffers_sizes() for part in parts)
