"""What each way made of a function, as text to read: its graph, and the code that inductor generates from it.

    print(show("torch.jit.trace", fn, x))
    print(show("torch.compile", fn, x))             # every graph that Dynamo broke the function into
    print(show("torch.compile, inductor", fn, x))   # C++ on the CPU, Triton on a GPU

The text is the same on every run: addresses, paths and counters of the process are left out.
"""

import copy
import re
import textwrap
import warnings
from collections.abc import Callable
from typing import Any
from unittest import mock

import torch

from . import capture, words

_QUOTED = re.compile(r"async_compile\.(?:cpp\w*|triton)\((?:.|\n)*?r?'''\n?((?:.|\n)*?)'''")
_ORIGIN = re.compile(r"\s+# (?:\S+\.py\b|<?torch).*$")  # on a node of TorchScript's
_LINE = re.compile(r"\s*# (?:File:|\S+\.py\b)")  # over one of export's
_BOOKKEEPING = ("inductor_cpu_integer_div_error", "RAIIAtenRecordFunctionHandle", "#include", "#pragma GCC ivdep")


def show(way: str, fn: Callable[..., Any], *example: Any) -> str:
    """What `way`, a name in `capture.WAYS`, captures of `fn(*example)`. Raises what capturing raises.

    Costs what capturing costs; with inductor some seconds, for kernels are compiled (from no cache) and run.
    """
    if way not in _SHOWN:
        raise ValueError(f"way is {way!r}; it must be one of: {', '.join(_SHOWN)}")
    with capture.alone(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        text = _SHOWN[way](fn, copy.deepcopy(example))
    return _tidy(text)


def generated_code(fn: Callable[..., Any], *example: Any) -> list[str]:
    """The kernels that inductor generates for `fn(*example)`, without gradients, whole as it wrote them.

    Not what it calls from a library, as a matrix product: such a call has no code of its own.
    """
    import torch._functorch.config as autograd
    from torch._inductor import config
    from torch._inductor.graph import GraphLowering

    written: list[str] = []
    # From a cache of graphs the code would be loaded, not written.
    with (
        capture.alone(),
        config.patch(fx_graph_cache=False),
        autograd.patch(enable_autograd_cache=False),
        mock.patch.object(GraphLowering, "save_output_code", written.append),
        torch.no_grad(),
    ):
        torch.compile(fn)(*example)
    return [kernel for module in dict.fromkeys(written) for kernel in _QUOTED.findall(module)]


def _torchscript(way: str) -> Callable[[Callable[..., Any], tuple[Any, ...]], str]:
    def text(fn: Callable[..., Any], example: tuple[Any, ...]) -> str:
        captured = capture.WAYS[way](fn, example)
        return f"{captured.graph}\n{captured.code}"

    return text


def _fx(fn: Callable[..., Any], example: tuple[Any, ...]) -> str:
    return torch.fx.symbolic_trace(fn).code


def _dynamo(fn: Callable[..., Any], example: tuple[Any, ...], fullgraph: bool = False) -> str:
    graphs, keep = capture.kept_graphs()
    torch.compile(fn, backend=keep, fullgraph=fullgraph)(*example)
    parts = [f"# graph {number} of {len(graphs)}\n{graph.code.strip()}" for number, graph in enumerate(graphs, 1)]
    return "\n\n".join(parts)


def _export(fn: Callable[..., Any], example: tuple[Any, ...], strict: bool = False) -> str:
    program = capture.exported(fn, example, strict=strict)
    return f"{program.graph_module.print_readable(print_output=False)}\n{program.graph_signature}"


def _inductor(fn: Callable[..., Any], example: tuple[Any, ...]) -> str:
    return "\n\n".join(kernel_body(kernel) for kernel in generated_code(fn, *example))


_SHOWN: dict[str, Callable[[Callable[..., Any], tuple[Any, ...]], str]] = {
    capture.TRACE: _torchscript(capture.TRACE),
    capture.SCRIPT: _torchscript(capture.SCRIPT),
    capture.FX: _fx,
    capture.COMPILE: _dynamo,
    capture.FULLGRAPH: lambda fn, example: _dynamo(fn, example, fullgraph=True),
    capture.INDUCTOR: _inductor,
    capture.EXPORT: _export,
    capture.STRICT: lambda fn, example: _export(fn, example, strict=True),
}


def kernel_body(code: str) -> str:
    """A generated kernel from its signature on, without what stands there for every kernel alike."""
    lines = code.splitlines()
    begin = next((n for n, line in enumerate(lines) if line.startswith(('extern "C"', "def "))), 0)
    kept = [line for line in lines[begin:] if not any(word in line for word in _BOOKKEEPING)]
    return textwrap.dedent("\n".join(kept)).strip()


def _tidy(text: str) -> str:
    """Without addresses and paths, and without the remarks on which line of the source a node comes from."""
    lines = [_ORIGIN.sub("", line).rstrip() for line in words.clean(text).splitlines() if not _LINE.match(line)]
    return re.sub(r"\n{3,}", "\n\n", "\n".join(lines)).strip()
