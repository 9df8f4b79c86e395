"""The mode behind `Autocast`: what it casts in the calls that it intercepts.

A handler of a function takes the mode, the function, its arguments and its keywords, and returns the call's result.
"""

import functools
import sys
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import PreDispatchTorchFunctionMode
from torch.utils import checkpoint

from . import autocast_internals as internals
from .autocast_policy import FP32, FP32_RESULT, LOW, PROMOTE, REFUSE, functions_of, policies

Handler = Callable[["CastingMode", Callable, tuple, dict | None], Any]

CASTABLE = frozenset({torch.float16, torch.bfloat16, torch.float32})
HALVES = CASTABLE - {torch.float32}
NARROW = {torch.float16: Tensor.half, torch.bfloat16: Tensor.bfloat16}  # quicker to call than Tensor.to
_SCALARS = frozenset({int, float, bool, str, type(None), torch.dtype})

_grad_enabled = torch.is_grad_enabled
_compiling = torch.compiler.is_dynamo_compiling
_saved_tensor_hooks = getattr(torch._C._autograd, "_top_saved_tensors_default_hooks", lambda ignore: None)


class CastingMode(PreDispatchTorchFunctionMode):
    """The state of one thread's outermost region.

    To modes of its base class, and to no other, `torch.autocast` tells when its regions begin and end.
    """

    def __init__(self, settings: Any) -> None:
        self.casts_of: dict[torch.dtype, dict[int, tuple]] = {}
        self.hooks = self.hooks_outside = _saved_tensor_hooks(True)
        self.use(settings, [])

    def use(self, settings: Any, torchs_regions: list[str | None]) -> None:
        """Switch to these settings, except on devices with a region of torch's own, which are listed innermost last.

        Cached casts stay valid until the outermost region ends.
        """
        self.settings, self.torchs_regions = settings, torchs_regions
        self.table = handlers(settings.enabled, settings.device_type, frozenset(filter(None, torchs_regions)))
        self.low, self.device_type = settings.dtype, settings.device_type
        self.narrow = NARROW[settings.dtype]
        self.casts = self.casts_of.setdefault(settings.dtype, {}) if settings.cache_enabled else None

    def __torch_function__(self, func: Callable, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        if _compiling():
            refuse_to_compile()
        handler = self.table.get(func)
        if handler is None:
            return func(*args, **kwargs) if kwargs else func(*args)
        hooks = _saved_tensor_hooks(True)
        if hooks is not None and hooks != self.hooks:
            self.remember_for_recomputation()
        return handler(self, func, args, kwargs)

    def to_low(self, value: Any) -> Any:
        """The value, with tensors that are to be cast (also in lists and tuples) in the region's type."""
        kind = type(value)
        if kind in _SCALARS:
            return value
        if kind is list or kind is tuple:
            return kind([self.to_low(item) for item in value])
        if not isinstance(value, Tensor):
            return value
        dtype, casts = value.dtype, self.casts
        if dtype is self.low or dtype not in CASTABLE:
            return value
        if casts is not None and dtype is torch.float32:
            cached = casts.get(id(value))  # (weight, its version, whether the cast has a graph, cast)
            # `_version` counts in-place changes. A cast without a graph would lose the weight's gradient.
            if cached is not None and cached[1] == value._version and (cached[2] or not _grad_enabled()):
                return cached[3]
            if value.requires_grad and value.is_leaf and not value._is_view() and not value.is_inference():
                if not self.concerns(value):
                    return value
                cast = self.narrow(value)
                casts[id(value)] = (value, value._version, _grad_enabled(), cast)
                return cast
        return self.narrow(value) if self.concerns(value) else value

    def to_fp32(self, value: Any) -> Any:
        """The value, with half-precision tensors (also in lists and tuples) in fp32."""
        kind = type(value)
        if kind in _SCALARS:
            return value
        if kind is list or kind is tuple:
            return kind([self.to_fp32(item) for item in value])
        if isinstance(value, Tensor) and value.dtype in HALVES and self.concerns(value):
            return value.float()
        return value

    def concerns(self, tensor: Tensor) -> bool:
        return self.device_type is None or tensor.device.type == self.device_type

    def product_dtype(self, tensor: Tensor) -> torch.dtype | None:
        """For `helpers.lab.precision`: the type to which a product would cast this tensor; None if it wouldn't."""
        if not self.settings.enabled or tensor.device.type in self.torchs_regions:
            return None
        with torch._C.DisableTorchFunction():
            return self.low if tensor.dtype in CASTABLE and self.concerns(tensor) else None

    def suspended(self) -> Any:
        """For `helpers.lab.precision`: a region in which nothing is cast."""
        return type(self.settings)(enabled=False)

    def remember_for_recomputation(self) -> None:
        """Make a checkpoint that runs inside the outermost region recompute under the present settings."""
        hooks = self.hooks = _saved_tensor_hooks(True)
        if hooks is not None and hooks != self.hooks_outside:
            internals.bind_checkpoint_of_hook(hooks[0], self.settings)


def refuse_to_compile() -> None:
    raise RuntimeError(
        "Autocast works call by call, in Python, and can't be traced by torch.compile. Use torch.autocast around or "
        "inside compiled functions, or keep what runs under Autocast out of them with torch.compiler.disable."
    )


# As by torch.compiler.assume_constant_result, without importing the compiler: called while tracing, not traced.
# If traced code raised the error, the compiler would fall back to eager silently.
refuse_to_compile._dynamo_marked_constant = True


def _casting(cast: Callable[[CastingMode, Any], Any]) -> Handler:
    def handler(mode: CastingMode, func: Callable, args: tuple, kwargs: dict | None) -> Any:
        if not kwargs:
            return func(*[cast(mode, value) for value in args])
        if kwargs.get("out") is not None:
            return func(*args, **kwargs)
        kwargs = {name: cast(mode, value) for name, value in kwargs.items()}
        return func(*[cast(mode, value) for value in args], **kwargs)

    return handler


_low, _fp32 = _casting(CastingMode.to_low), _casting(CastingMode.to_fp32)


def _fp32_result(mode: CastingMode, func: Callable, args: tuple, kwargs: dict | None) -> Any:
    kwargs = kwargs or {}
    first = args[0] if args else kwargs.get("input", kwargs.get("A", kwargs.get("x")))
    dtype_given = kwargs.get("out") is not None or kwargs.get("dtype") is not None
    dtype_given = dtype_given or any(type(value) is torch.dtype for value in args)
    if not dtype_given and isinstance(first, Tensor) and first.dtype in HALVES and mode.concerns(first):
        kwargs = kwargs | {"dtype": torch.float32}
    return func(*args, **kwargs)


def _promote(mode: CastingMode, func: Callable, args: tuple, kwargs: dict | None) -> Any:
    if not kwargs or kwargs.get("out") is None:
        types = {tensor.dtype for tensor in _tensors(args, kwargs) if mode.concerns(tensor)}
        if len(types & CASTABLE) > 1:
            return _fp32(mode, func, args, kwargs)
    return func(*args, **(kwargs or {}))


def _refuse(mode: CastingMode, func: Callable, args: tuple, kwargs: dict | None) -> Any:
    if not any(mode.concerns(tensor) for tensor in _tensors(args, kwargs)):
        return func(*args, **(kwargs or {}))
    raise RuntimeError(
        f"{func.__name__} isn't safe in half precision: a probability that rounds to 0 or 1 has an infinite loss. "
        "Use binary_cross_entropy_with_logits on what goes into the sigmoid."
    )


def _look_inside(mode: CastingMode, func: Callable, args: tuple, kwargs: dict | None) -> Any:
    """Run a function that is written in Python with the mode on for the functions it calls."""
    inside = internals.without_question(func)
    with mode:
        return inside(*args, **(kwargs or {}))


def _rnn(mode: CastingMode, func: Callable, args: tuple, kwargs: dict | None) -> Any:
    cast = tuple(mode.to_low(value) for value in args)
    if not kwargs:
        internals.flatten_rnn(func, cast, args)
    return func(*cast, **(kwargs or {}))


def _set_grad_enabled(mode: CastingMode, func: Callable, args: tuple, kwargs: dict | None) -> Any:
    internals.bind_checkpoint_of_caller(sys._getframe(2), mode.settings)  # the caller of __torch_function__
    return func(*args, **(kwargs or {}))


def _reported_dtype(mode: CastingMode, func: Callable, args: tuple, kwargs: dict | None) -> Any:
    """`tensor.dtype`, but fp32 for the RNNs' check that input and weights agree: both are about to be cast."""
    dtype = func(*args)
    if dtype in HALVES and sys._getframe(2).f_code in internals.RNN_TYPE_CHECKS:
        return torch.float32
    return dtype


def _by_device(on_cpu: Handler | None, elsewhere: Handler | None) -> Handler:
    """For regions without `device_type`: the handler for the device of the call's first tensor."""

    def handler(mode: CastingMode, func: Callable, args: tuple, kwargs: dict | None) -> Any:
        first = args[0] if args else None
        if not isinstance(first, Tensor):
            first = next(_tensors(args, kwargs), None)
        chosen = on_cpu if first is None or first.is_cpu else elsewhere
        return func(*args, **(kwargs or {})) if chosen is None else chosen(mode, func, args, kwargs)

    return handler


def _tensors(values: Iterable[Any], kwargs: dict | None = None) -> Iterator[Tensor]:
    for value in (*values, *(kwargs or {}).values()):
        if isinstance(value, Tensor):
            yield value
        elif type(value) in (list, tuple):
            yield from _tensors(value)


def _torchs_region_begins(mode: CastingMode, func: Callable, args: tuple, kwargs: dict | None) -> None:
    """`torch.autocast(args[0])` is entered. A checkpoint does so to restore torch's state, which isn't ours."""
    mode.remember_for_recomputation()
    kind = None if sys._getframe(3).f_globals is vars(checkpoint) else args[0]  # who called autocast's __enter__
    mode.use(mode.settings, [*mode.torchs_regions, kind])


def _torchs_region_ends(mode: CastingMode, func: Callable, args: tuple, kwargs: dict | None) -> None:
    mode.use(mode.settings, mode.torchs_regions[:-1])


_HANDLERS: dict[str, Handler] = {LOW: _low, FP32: _fp32, FP32_RESULT: _fp32_result, PROMOTE: _promote, REFUSE: _refuse}
_TORCHS_REGIONS = {torch.amp._enter_autocast: _torchs_region_begins, torch.amp._exit_autocast: _torchs_region_ends}


@functools.cache
def handlers(enabled: bool, device_type: str | None, without: frozenset[str]) -> dict[Callable, Handler]:
    """The handler of each function that isn't left alone, on all devices but those of kinds `without`.

    Takes some milliseconds, once a process for each set of arguments.
    """
    kinds = ("cpu", "cuda") if device_type is None else (device_type,)
    if device_type is None:
        without = frozenset("cpu" if kind == "cpu" else "cuda" for kind in without)
    if not enabled or without.issuperset(kinds):
        return _TORCHS_REGIONS
    found: dict[Callable, Handler] = dict.fromkeys(internals.python_functions(), _look_inside)
    chosen = {kind: {} if kind in without else policies(kind) for kind in kinds}
    for name in set().union(*chosen.values()):
        by_kind = [_HANDLERS.get(chosen[kind].get(name)) for kind in kinds]
        handler = by_kind[0] if len(set(by_kind)) == 1 else _by_device(*by_kind)
        found |= dict.fromkeys(functions_of(name), handler)
    rnn = _by_device(*(None if kind in without else _rnn for kind in kinds)) if without.intersection(kinds) else _rnn
    found |= {getattr(torch, name): rnn for name in internals.RNN_FUNCTIONS}
    found[torch._C._set_grad_enabled] = _set_grad_enabled
    found[Tensor.dtype.__get__] = _reported_dtype
    return found | _TORCHS_REGIONS
