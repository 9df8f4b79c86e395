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
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from helpers.lab.precision import casting_mode

from . import autocast_internals as internals
from .autocast_policy import FP32, FP32_RESULT, LOW, PROMOTE, REFUSE, functions_of, policies

Handler = Callable[["CastingMode", Callable, tuple, dict | None], Any]

CASTABLE = frozenset({torch.float16, torch.bfloat16, torch.float32})
HALVES = CASTABLE - {torch.float32}
_NARROW = {torch.float16: Tensor.half, torch.bfloat16: Tensor.bfloat16}  # quicker to call than Tensor.to
_SCALARS = frozenset({int, float, bool, str, type(None), torch.dtype})

_grad_enabled = torch.is_grad_enabled
_compiling = torch.compiler.is_dynamo_compiling
_saved_tensor_hooks = getattr(torch._C._autograd, "_top_saved_tensors_default_hooks", lambda ignore: None)


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

    Regions nest, with other settings or `enabled=False` inside, and belong to one thread. Recomputation by
    `torch.utils.checkpoint` runs under the settings of the forward. Custom operations ask
    `helpers.lab.precision.autocast_dtype`.

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
        if dtype not in _NARROW:
            raise ValueError(f"Autocast: dtype must be torch.float16 or torch.bfloat16, not {dtype}")
        if device_type is not None and not _is_kind_of_device(device_type):
            raise ValueError(f"Autocast: device_type is a kind of device, like 'cuda' or 'cpu', not {device_type!r}")
        self.dtype, self.enabled, self.device_type, self.cache_enabled = dtype, enabled, device_type, cache_enabled

    def __enter__(self) -> "Autocast":
        if _compiling():
            refuse_to_compile()
        mode = casting_mode()
        if mode is not None:
            mode.remember_for_recomputation()
            _entered.regions.append((mode, mode.settings))
            mode.use(self)
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
            mode.use(before)
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
    """This thread's nested regions, outermost first: the mode, and the settings to restore."""

    def __init__(self) -> None:
        self.regions: list[tuple[CastingMode | None, Autocast | None]] = []


_entered = _Entered()


class CastingMode(TorchFunctionMode):
    """The state of one thread's outermost region."""

    def __init__(self, settings: Autocast) -> None:
        super().__init__()
        self.casts_of: dict[torch.dtype, dict[int, tuple]] = {}
        self.hooks = self.hooks_outside = _saved_tensor_hooks(True)
        self.use(settings)

    def use(self, settings: Autocast) -> None:
        """Switch to these settings. Cached casts stay valid until the outermost region ends."""
        self.settings = settings
        self.table = _handlers(settings.device_type) if settings.enabled else {}
        self.low, self.device_type = settings.dtype, settings.device_type
        self.narrow = _NARROW[settings.dtype]
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
        if not self.settings.enabled:
            return None
        with torch._C.DisableTorchFunction():
            return self.low if tensor.dtype in CASTABLE and self.concerns(tensor) else None

    def suspended(self) -> Autocast:
        """For `helpers.lab.precision`: a region in which nothing is cast."""
        return Autocast(enabled=False)

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


# Handlers of calls of listed functions.


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


_HANDLERS: dict[str, Handler] = {LOW: _low, FP32: _fp32, FP32_RESULT: _fp32_result, PROMOTE: _promote, REFUSE: _refuse}


@functools.cache
def _handlers(device_type: str | None) -> dict[Callable, Handler]:
    """The handler of each function that isn't left alone. Takes some milliseconds, once a process."""
    handlers: dict[Callable, Handler] = dict.fromkeys(internals.python_functions(), _look_inside)
    kinds = ("cpu", "cuda") if device_type is None else (device_type,)
    chosen = {kind: policies(kind) for kind in kinds}
    for name in set().union(*chosen.values()):
        by_kind = [_HANDLERS.get(chosen[kind].get(name)) for kind in kinds]
        handler = by_kind[0] if len(set(by_kind)) == 1 else _by_device(*by_kind)
        handlers |= dict.fromkeys(functions_of(name), handler)
    handlers |= {getattr(torch, name): _rnn for name in internals.RNN_FUNCTIONS}
    handlers[torch._C._set_grad_enabled] = _set_grad_enabled
    handlers[Tensor.dtype.__get__] = _reported_dtype
    return handlers


def _is_kind_of_device(name: object) -> bool:
    try:
        return isinstance(name, str) and torch.device(name).type == name
    except RuntimeError:
        return False
