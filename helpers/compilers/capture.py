"""Capturing a graph of a Python function: six variants behind one signature, and what torch.compile makes of it.

    captured = VARIANTS["torch.jit.trace"](fn, example)
    captured(*other)
    print(show("Dynamo", fn, x))          # every graph that Dynamo broke the function into
    print(show("torch.compile", fn, x))   # C++ on the CPU, Triton on a GPU

A tracer runs the function and records its operations; TorchScript's `script` compiles its source; fx runs it on proxies
without values; Dynamo analyses its bytecode, guards its assumptions, and leaves unsupported code to Python (a graph
break); export captures all of it in one graph, or raises.
"""

import contextlib
import copy
import inspect
import io
import logging
import re
import textwrap
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from ..lab.arguments import check_choice
from .messages import clean

Function = Callable[..., Any]
Example = tuple[Any, ...]
Capture = Callable[[Function, Example], Function]

TRACE, SCRIPT, FX = "torch.jit.trace", "torch.jit.script", "torch.fx.symbolic_trace"
# Dynamo: torch.compile(backend="eager"), whose graphs are run by torch's own operations: only the capture can be wrong.
DYNAMO, INDUCTOR = "Dynamo", "torch.compile"
BY_DYNAMO = (DYNAMO, INDUCTOR)
EXPORT = "torch.export"


def as_module(fn: Function) -> nn.Module:
    """A function wrapped in a module with the function's signature, as torch.export needs; modules are returned."""
    if isinstance(fn, nn.Module):
        return fn

    def forward(*args: Any) -> Any:
        return fn(*args)

    forward.__signature__ = inspect.signature(fn)
    module = nn.Module()
    module.forward = forward
    return module


# torch.compile captures at its first call, and again when a guard fails; the others once, here.
VARIANTS: dict[str, Capture] = {
    TRACE: lambda fn, example: torch.jit.trace(fn, example),
    SCRIPT: lambda fn, example: torch.jit.script(fn),
    FX: lambda fn, example: torch.fx.symbolic_trace(fn),
    DYNAMO: lambda fn, example: torch.compile(fn, backend="eager"),
    INDUCTOR: lambda fn, example: torch.compile(fn),
    EXPORT: lambda fn, example: torch.export.export(as_module(fn), example).module(),
}


@contextlib.contextmanager
def silent() -> Iterator[None]:
    """A context without output and logs: torch.export prints a partial graph before it raises."""
    disabled = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
            yield
    finally:
        logging.disable(disabled)


@contextlib.contextmanager
def isolated() -> Iterator[None]:
    """A silent context with an empty torch.compile cache before and after.

    The cache belongs to the process, so functions compiled earlier are compiled again at their next call.
    """
    forget_compiled()
    try:
        with silent():
            yield
    finally:
        forget_compiled()


def forget_compiled() -> None:
    """Clear torch.compile's cache and compilation metrics in this process."""
    from torch._dynamo.utils import clear_compilation_metrics

    torch._dynamo.reset()
    clear_compilation_metrics()


def show(variant: str, fn: Function, *example: Any) -> str:
    """Dynamo's graphs of `fn(*example)`, or the kernels that inductor generates from them (`torch.compile`).

    The text is reproducible: addresses, paths and process-wide counters are removed. Raises what capturing raises. It
    costs a capture; with inductor some seconds, as kernels are compiled without a cache and run.
    """
    check_choice(BY_DYNAMO, variant=variant)
    if variant == INDUCTOR:
        return clean("\n\n".join(map(kernel_body, generated_code(fn, *example))))
    graphs: list[torch.fx.GraphModule] = []

    def collect(graph: torch.fx.GraphModule, inputs: list[Any]) -> Function:
        """A backend of torch.compile that runs a graph as it is."""
        graphs.append(graph)
        return graph.forward

    with isolated():
        torch.compile(fn, backend=collect)(*copy.deepcopy(example))
    parts = [f"# graph {number} of {len(graphs)}\n{graph.code.strip()}" for number, graph in enumerate(graphs, 1)]
    return clean("\n\n".join(parts))


def generated_code(fn: Function, *example: Any) -> list[str]:
    """The unabridged code of the kernels that inductor generates for `fn(*example)`, without gradients.

    Library calls, such as matrix products, have no generated code.
    """
    from torch._inductor.utils import run_and_get_code

    # With the graph cache, code would be loaded and not generated.
    with isolated(), torch.compiler.config.patch(force_disable_caches=True), torch.no_grad():
        _, modules = run_and_get_code(torch.compile(fn), *copy.deepcopy(example))
    return [kernel for module in modules for kernel in _QUOTED.findall(module)]


def kernel_body(code: str) -> str:
    """A generated kernel from its signature on, without boilerplate lines."""
    lines = code.splitlines()
    begin = next((n for n, line in enumerate(lines) if line.startswith(('extern "C"', "def "))), 0)
    body = [line for line in lines[begin:] if not any(word in line for word in _BOOKKEEPING)]
    return textwrap.dedent("\n".join(body)).strip()


_QUOTED = re.compile(r"async_compile\.(?:cpp\w*|triton)\((?:.|\n)*?r?'''\n?((?:.|\n)*?)'''")
_BOOKKEEPING = ("inductor_cpu_integer_div_error", "RAIIAtenRecordFunctionHandle", "#include", "#pragma GCC ivdep")
