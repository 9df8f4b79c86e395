"""The ways of making a graph of a Python function, all behind one signature.

    captured = WAYS["torch.jit.trace"](fn, example)
    captured(*other)

A tracer runs the function and writes down what it does; TorchScript's `script` compiles its source; fx runs it on
proxies that have no values; Dynamo reads its bytecode, guards what it relies on, and leaves to Python what it can't
take; export takes all of it, or refuses.
"""

import contextlib
import inspect
import io
import logging
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

Way = Callable[[Callable[..., Any], tuple[Any, ...]], Callable[..., Any]]

TRACE, SCRIPT, FX = "torch.jit.trace", "torch.jit.script", "torch.fx.symbolic_trace"
COMPILE, FULLGRAPH, INDUCTOR = "torch.compile", "torch.compile, fullgraph", "torch.compile, inductor"
EXPORT, STRICT, REPAIRED = "torch.export", "torch.export, strict", "torch.export, repaired"


@contextlib.contextmanager
def silent() -> Iterator[None]:
    """Nothing is printed or logged within: torch.export prints the graph as far as it got before it refuses."""
    disabled = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
            yield
    finally:
        logging.disable(disabled)


@contextlib.contextmanager
def alone() -> Iterator[None]:
    """Nothing that Dynamo kept of other functions counts within, nothing of this stays, and all is silent.

    What torch.compile keeps belongs to the process: what was compiled before is compiled again when it is next called.
    """
    forget()
    try:
        with silent():
            yield
    finally:
        forget()


def forget() -> None:
    """Forget all that torch.compile has compiled in this process, and its records of it."""
    from torch._dynamo.utils import clear_compilation_metrics

    torch._dynamo.reset()
    clear_compilation_metrics()


def as_module(fn: Callable[..., Any]) -> nn.Module:
    """A function as a module, which torch.export wants, with the function's own signature."""
    if isinstance(fn, nn.Module):
        return fn

    def forward(*args: Any) -> Any:
        return fn(*args)

    forward.__signature__ = inspect.signature(fn)
    module = nn.Module()
    module.forward = forward
    return module


def exported(
    fn: Callable[..., Any], example: tuple[Any, ...], *, strict: bool = False, dynamic: tuple[Any, ...] | None = None
) -> torch.export.ExportedProgram:
    """torch.export of a function or a module; `dynamic` says which sizes may differ, one entry an argument."""
    return torch.export.export(as_module(fn), example, strict=strict, dynamic_shapes=dynamic)


def kept_graphs() -> tuple[list[torch.fx.GraphModule], Callable[..., Any]]:
    """A backend for torch.compile that runs graphs as they are, and the list that it keeps them in."""
    graphs: list[torch.fx.GraphModule] = []

    def keep(graph: torch.fx.GraphModule, inputs: list[Any]) -> Callable[..., Any]:
        graphs.append(graph)
        return graph.forward

    return graphs, keep


def compiled(fn: Callable[..., Any], *, fullgraph: bool = False) -> Callable[..., Any]:
    """Dynamo alone: the graphs are run by torch's own operations, so that only the capture can be wrong."""
    return torch.compile(fn, backend="eager", fullgraph=fullgraph)


# torch.compile captures when it is first called, and again when a guard fails; the others once, here.
WAYS: dict[str, Way] = {
    TRACE: lambda fn, example: torch.jit.trace(fn, example),
    SCRIPT: lambda fn, example: torch.jit.script(fn),
    FX: lambda fn, example: torch.fx.symbolic_trace(fn),
    COMPILE: lambda fn, example: compiled(fn),
    FULLGRAPH: lambda fn, example: compiled(fn, fullgraph=True),
    INDUCTOR: lambda fn, example: torch.compile(fn),
    EXPORT: lambda fn, example: exported(fn, example).module(),
    STRICT: lambda fn, example: exported(fn, example, strict=True).module(),
}
BY_DYNAMO = (COMPILE, FULLGRAPH, INDUCTOR)
