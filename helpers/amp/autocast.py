"""`Autocast`: mixed precision for a region of code, implemented in Python.

A `TorchFunctionMode` intercepts every call of torch's Python interface (functions, methods, operators, properties) in
its thread, above autograd, so that casts are differentiated like any operation. (A `TorchDispatchMode` is below
autograd: casts there would not be differentiated, and gradients would have the wrong type.) For each call it looks up
the function, casts its inputs, and runs it. It doesn't see calls within C++; `autocast_policy` therefore lists the
outer functions, and `autocast_internals` runs torch's functions that are written in Python under the mode.

The overhead over torch.autocast, on a 2-core CPU: 1.5 µs for a method or property (`x.shape`) that is left alone, 4 µs
for a function written in Python (`F.relu`), 6 µs for a linear layer whose weight is already cast.
"""

import functools
import inspect
import threading
from collections.abc import Callable
from typing import Any

import torch

from helpers.lab.precision import casting_mode

from .autocast_mode import NARROW, CastingMode, refuse_to_compile


class Autocast:
    """Run matrix products, convolutions and attention in `dtype`, and operations that need range or precision in fp32.

    A context manager for the forward pass and the loss, or a decorator:

        with Autocast(torch.bfloat16):
            loss = criterion(model(x), target)
        loss.backward()

    Functions run in the same types as under torch.autocast, listed by `autocast_policy()` for CUDA and for the CPU:
    `device_type` selects the list, or, if it is None, the device of each call's tensors. In-place and out= variants,
    fp64 and integers are left alone. Casts are differentiated, so gradients have the types of their parameters. With
    `cache_enabled` the cast of an fp32 weight is cached until the outermost region ends, or the weight changes.

    Regions nest, with other settings or `enabled=False` inside, and belong to one thread. A `torch.autocast` inside
    rules on its kind of device until it ends, `enabled=False` too. Recomputation by `torch.utils.checkpoint` runs
    under the settings of the forward. Custom operations ask `helpers.lab.precision.autocast_dtype`.

    The overhead is some microseconds of Python for each call of a torch function and each access to a property
    (`x.shape`), which is hidden if the GPU is the bottleneck. `torch.compile` around or inside it is an error.
    """

    def __init__(
        self,
        dtype: torch.dtype = torch.float16,
        enabled: bool = True,
        device_type: str | None = None,
        cache_enabled: bool = True,
    ) -> None:
        if dtype not in NARROW:
            raise ValueError(f"Autocast: dtype must be torch.float16 or torch.bfloat16, not {dtype}")
        if device_type is not None and not _is_kind_of_device(device_type):
            raise ValueError(f"Autocast: device_type is a kind of device, like 'cuda' or 'cpu', not {device_type!r}")
        self.dtype, self.enabled, self.device_type, self.cache_enabled = dtype, enabled, device_type, cache_enabled

    def __enter__(self) -> "Autocast":
        if torch.compiler.is_dynamo_compiling():
            refuse_to_compile()
        mode = casting_mode()
        if mode is not None:
            mode.remember_for_recomputation()
            _entered.regions.append((mode, (mode.settings, mode.torchs_regions)))
            mode.use(self, [])
        elif self.enabled:
            mode = CastingMode(self)
            mode.__enter__()
            _entered.regions.append((mode, None))
        else:
            _entered.regions.append((None, None))
        return self

    def __exit__(self, *exception: Any) -> None:
        mode, before = _entered.regions.pop()
        if before is not None:
            mode.use(*before)
        elif mode is not None:
            depth = torch._C._len_torch_function_stack()
            if not depth or torch._C._get_function_stack_at(depth - 1) is not mode:
                raise RuntimeError("Autocast: a region was left while another mode, entered inside it, is still on")
            mode.__exit__(None, None, None)
            mode.casts_of.clear()

    def __call__(self, function: Callable) -> Callable:
        if inspect.isgeneratorfunction(function) or inspect.iscoroutinefunction(function):
            raise TypeError(
                f"Autocast can't decorate {function.__name__}: its body runs later, when it is iterated or awaited. "
                "Use `with Autocast(...)` in the body."
            )
        return functools.wraps(function, updated=())(self.bind(function))

    def bind(self, function: Callable) -> Callable:
        """A function that calls `function` under these settings."""

        def under_autocast(*args: Any, **kwargs: Any) -> Any:
            with self:
                return function(*args, **kwargs)

        return under_autocast

    def __repr__(self) -> str:
        settings = f"dtype={self.dtype}, enabled={self.enabled}, device_type={self.device_type!r}"
        return f"Autocast({settings}, cache_enabled={self.cache_enabled})"


class _Entered(threading.local):
    """This thread's nested regions, outermost first: the mode, and the arguments of `use` to restore."""

    def __init__(self) -> None:
        self.regions: list[tuple[CastingMode | None, tuple | None]] = []


_entered = _Entered()


def _is_kind_of_device(name: object) -> bool:
    try:
        return isinstance(name, str) and torch.device(name).type == name
    except RuntimeError:
        return False
