"""torch.compile and AOTInductor: the same compiler, once while the program runs and once ahead of it.

Both generate C++ for the CPU and Triton for a GPU; products and convolutions mostly stay those of the libraries.
Compiling costs 10 to 60 s for the models here, and more for `max-autotune`, which times candidates. What was
compiled is kept on disk, where a second process finds most of it; `empty_cache` shows the time of the first.
"""

import contextlib
import functools
import types
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from torch import Tensor, nn

from helpers.lab import device
from helpers.lab.machine import NOT_INSTALLED, installed

from .exported import export, without_treespec_warning
from .failures import failures_named

MODES = ("default", "reduce-overhead", "max-autotune")


def compiled(model: Callable, mode: str = "default") -> Callable:
    """A function that compiles the model when it is first called, for the sizes that it is called with.

    What torch.compile made is kept with the code object of the function, eight variants at most, after which it runs
    eagerly and says so in a log. Models that are measured one after another share their class's `forward`; so the
    function gets code of its own, which also goes when the function does.
    """
    if mode not in MODES:
        raise ValueError(f"mode is {mode!r}; allowed: {', '.join(map(repr, MODES))}")

    def call(*inputs: Tensor):
        return model(*inputs)

    own = types.FunctionType(call.__code__.replace(), call.__globals__, "call", None, call.__closure__)
    return torch.compile(own, mode=mode, dynamic=False, fullgraph=True)


def ahead_of_time(model: nn.Module, example: tuple[Tensor, ...], folder: Path) -> Callable:
    """Export, compile to a shared library in a `.pt2` package, and load that: it runs without Python, too."""
    program = export(model, example)
    with failures_named("compile"), torch.no_grad(), without_treespec_warning():
        package = torch._inductor.aoti_compile_and_package(program, package_path=str(folder / "model.pt2"))
    return torch._inductor.aoti_load_package(package)


def missing(device: torch.device) -> str | None:
    """What Inductor lacks on this machine to compile for a device, as a row's status.

    Both the C++ for a CPU and what Triton launches its kernels by are built against Python's header.
    """
    needed = ["C++ compiler", "Python.h"] + (["triton"] if device.type == "cuda" else [])
    return next((NOT_INSTALLED + name for name in needed if installed(name) is None), None)


@functools.cache
def start() -> None:
    """Compile something trivial: importing Inductor and asking for the processor's abilities take seconds, once."""
    torch.compile(lambda x: x + 1, dynamic=False)(torch.zeros(2, device=device()))


@contextlib.contextmanager
def empty_cache(folder: Path) -> Iterator[None]:
    """What is compiled inside finds nothing compiled before, and is written under the folder, where it stays."""
    from torch._inductor.utils import fresh_cache

    with fresh_cache(dir=str(folder), delete=False):
        yield
