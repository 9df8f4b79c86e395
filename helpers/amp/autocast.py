"""`Autocast`: mixed precision for the code inside it, by Python alone."""

import functools
import inspect
import threading
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from helpers.lab.precision import casting_mode

from . import autocast_mode, autocast_rnn
from .autocast_inside import python_functions
from .autocast_mode import HANDLERS, CastingMode, Handler
from .autocast_policy import functions_of, policies

DTYPES = (torch.float16, torch.bfloat16)


class Autocast:
    """Run matrix products, convolutions and attention in `dtype`, and what needs its range or precision in fp32.

    A context manager for the forward pass and the loss, or a decorator:

        with Autocast(torch.bfloat16):
            loss = criterion(model(x), target)
        loss.backward()

    Which function runs in which type is torch.autocast's choice, as printed by `autocast_policy()`: its list for
    CUDA or for the CPU, by `device_type`, or, if that is None, by the tensors of each call. In-place and out=
    variants, fp64 and integers are left alone. Casts are differentiated, so gradients have the type of what they
    belong to. The cast of an fp32 weight is kept until the outermost region is left (`cache_enabled`), and made again
    if the weight was changed in between.

    Regions nest, with other settings or `enabled=False` inside. They belong to one thread. What
    `torch.utils.checkpoint` recomputes in backward runs under the settings of its forward. Custom operations ask
    `helpers.lab.precision.autocast_dtype`.

    It costs some microseconds of Python for each call of a torch function and each look at a property
    (`x.shape`), which is hidden where the GPU is the bottleneck. `torch.compile` around or inside it is an error.
    """

    def __init__(
        self,
        dtype: torch.dtype = torch.float16,
        enabled: bool = True,
        device_type: str | None = None,
        cache_enabled: bool = True,
    ) -> None:
        if dtype not in DTYPES:
            raise ValueError(f"Autocast: dtype must be torch.float16 or torch.bfloat16, not {dtype}")
        if device_type is not None and not _is_kind_of_device(device_type):
            raise ValueError(f"Autocast: device_type is a kind of device, like 'cuda' or 'cpu', not {device_type!r}")
        self.dtype, self.enabled, self.device_type, self.cache_enabled = dtype, enabled, device_type, cache_enabled

    def __enter__(self) -> "Autocast":
        if torch.compiler.is_dynamo_compiling():
            autocast_mode.refuse_to_compile()
        mode = casting_mode()
        if mode is not None:
            mode.remember_for_recomputation()
            _entered.regions.append((mode, mode.settings))
            mode.use(self, _table(self))
        elif self.enabled:
            mode = CastingMode()
            mode.use(self, _table(self))
            mode.__enter__()
            _entered.regions.append((mode, None))
        else:
            _entered.regions.append((None, None))
        return self

    def __exit__(self, *exception: Any) -> None:
        mode, before = _entered.regions.pop()
        if before is not None:
            mode.use(before, _table(before))
        elif mode is not None:
            depth = torch._C._len_torch_function_stack()
            if not depth or torch._C._get_function_stack_at(depth - 1) is not mode:
                raise RuntimeError("Autocast: a region was left while another mode, entered inside it, is still on")
            mode.__exit__(None, None, None)
            mode.casts_of.clear()

    def __call__(self, function: Callable) -> Callable:
        if any(kind(function) for kind in (inspect.isgeneratorfunction, inspect.iscoroutinefunction)):
            raise TypeError(
                f"Autocast can't decorate {function.__name__}: its body runs later, when it is iterated or awaited. "
                "Use `with Autocast(...)` in the body."
            )
        return functools.wraps(function, updated=())(self.bind(function))

    def bind(self, function: Callable) -> Callable:
        """The function, run under these settings whenever it is called."""

        def under_autocast(*args: Any, **kwargs: Any) -> Any:
            with self:
                return function(*args, **kwargs)

        return under_autocast

    def __repr__(self) -> str:
        return (
            f"Autocast(dtype={self.dtype}, enabled={self.enabled}, device_type={self.device_type!r}, "
            f"cache_enabled={self.cache_enabled})"
        )


def _is_kind_of_device(name: object) -> bool:
    try:
        return isinstance(name, str) and torch.device(name).type == name
    except RuntimeError:
        return False


class _Entered(threading.local):
    """The regions that this thread is in, outermost first: the mode and the settings to go back to."""

    def __init__(self) -> None:
        self.regions: list[tuple[CastingMode | None, Autocast | None]] = []


_entered = _Entered()


def _table(settings: Autocast) -> dict[Callable, Handler]:
    if not settings.enabled:
        return {}
    return _handlers(settings.device_type)


@functools.cache
def _handlers(device_type: str | None) -> dict[Callable, Handler]:
    """What to do with each function that isn't left alone. Takes some milliseconds, once a process."""
    handlers: dict[Callable, Handler] = dict.fromkeys(python_functions(), autocast_mode.look_inside)
    kinds = ("cpu", "cuda") if device_type is None else (device_type,)
    chosen = {kind: policies(kind) for kind in kinds}
    for name in set().union(*chosen.values()):
        each = [HANDLERS.get(chosen[kind].get(name)) for kind in kinds]
        handler = each[0] if len(set(each)) == 1 else autocast_mode.by_device(*each)
        for function in functions_of(name):
            handlers[function] = handler
    for name in autocast_rnn.FUNCTIONS:
        handlers[getattr(torch, name)] = autocast_mode.rnn
    handlers[torch._C._set_grad_enabled] = autocast_mode.set_grad_enabled
    handlers[Tensor.dtype.__get__] = autocast_mode.reported_dtype
    return handlers
