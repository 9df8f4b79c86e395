"""TorchScript: a graph in a language of its own, run without Python.

Deprecated: since 2.10 or so each of its functions warns "`torch.jit.trace` is deprecated. Please switch to
`torch.compile` or `torch.export`". It is measured because models in production still run in it, and because the lecture
does. Those warnings, and no others, are kept from the output: `TracerWarning`, which tells of a graph that will be
wrong, still appears.

For inference the module is frozen (weights become constants) and optimised (batch norms go into the convolutions; on
the CPU convolutions go to oneDNN). That costs a second or so. The first two runs watch types and compile, so that they
are slow; warm up with three.
"""

import contextlib
import warnings
from collections.abc import Iterator

import torch
from torch import Tensor, nn

from .failures import failures_named


def frozen_trace(model: nn.Module, example: tuple[Tensor, ...]) -> nn.Module:
    return _frozen(traced(model, example))


def frozen_script(model: nn.Module, example: tuple[Tensor, ...]) -> nn.Module:
    return _frozen(scripted(model))


def traced(model: nn.Module, example: tuple[Tensor, ...]) -> torch.jit.ScriptModule:
    """What the model does on the example, as a module. A branch is recorded the way that the example took.

    torch would run it a second time to see that it does the same; in training mode dropout and running means don't.
    """
    with without_deprecation(), failures_named("trace"):
        # Batch norm in training mode asks for the batch's size, for nothing but an error of its own.
        warnings.filterwarnings("ignore", category=torch.jit.TracerWarning, module=r"torch\.nn\.functional$")
        return torch.jit.trace(model, example, check_trace=not model.training)


def scripted(model: nn.Module) -> torch.jit.ScriptModule:
    """The model's source, compiled; what the language lacks is an `ExportFailed` that names the line."""
    with without_deprecation(), failures_named("script"):
        return torch.jit.script(model)


def _frozen(module: torch.jit.ScriptModule) -> nn.Module:
    with without_deprecation():
        return torch.jit.optimize_for_inference(torch.jit.freeze(module))


@contextlib.contextmanager
def without_deprecation() -> Iterator[None]:
    """TorchScript's own deprecation warnings are not shown inside; every other warning is."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", r"`torch\.jit\.\w+` is deprecated", DeprecationWarning)
        yield
