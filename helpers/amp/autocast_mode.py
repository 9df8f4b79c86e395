"""What happens to one call inside an `Autocast` region: look it up, cast its inputs, run it.

A `TorchFunctionMode` sees every call of torch's Python interface (functions, methods, operators, properties) of
its own thread, above autograd, so that the casts are differentiated like any operation. (A `TorchDispatchMode` sits
below autograd: a cast there would not be differentiated, and gradients would have the wrong type.) What torch
calls in C++ it doesn't see; `autocast_policy` therefore lists the outer functions, and functions that torch
writes in Python are looked into.

The cost is Python's. On the 2-core machine that this was written on, more than under torch.autocast: 1.5 µs for a
method or a property (`x.shape`) that is left alone, 4 µs for a function that torch writes in Python (`F.relu`), 6 µs
for a linear layer whose weight is already cast.
"""

import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from . import autocast_checkpoint, autocast_rnn
from .autocast_inside import without_question
from .autocast_policy import FP32, FP32_RESULT, LOW, PROMOTE, REFUSE

Handler = Callable[["CastingMode", Callable, tuple, dict | None], Any]

CASTABLE = frozenset({torch.float16, torch.bfloat16, torch.float32})
HALVES = CASTABLE - {torch.float32}
_NARROW = {torch.float16: Tensor.half, torch.bfloat16: Tensor.bfloat16}  # quicker to call than Tensor.to
_SCALARS = frozenset({int, float, bool, str, type(None), torch.dtype})

_grad_enabled = torch.is_grad_enabled
_compiling = torch.compiler.is_dynamo_compiling
_saved_tensor_hooks = getattr(torch._C._autograd, "_top_saved_tensors_default_hooks", lambda ignore: None)


class CastingMode(TorchFunctionMode):
    """The state of one thread between entering its outermost region and leaving it."""

    def __init__(self) -> None:
        super().__init__()
        self.casts_of: dict[torch.dtype, dict[int, tuple]] = {}
        self.hooks = self.hooks_outside = _saved_tensor_hooks(True)

    def use(self, settings: Any, table: dict[Callable, Handler]) -> None:
        """Work by these settings from here on. The casts stay: they hold for the outermost region."""
        self.settings, self.table = settings, table
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
        """The value in the region's type, if it is a tensor, or a list of tensors, that is to be cast."""
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
            known = casts.get(id(value))
            # A cast that was made without a graph is of no use where gradients are wanted.
            if known is not None and known[1] == value._version and (known[2] or not _grad_enabled()):
                return known[3]
            if value.requires_grad and value.is_leaf and not value._is_view() and not value.is_inference():
                if not self.concerns(value):
                    return value
                cast = self.narrow(value)
                casts[id(value)] = (value, value._version, _grad_enabled(), cast)
                return cast
        return self.narrow(value) if self.concerns(value) else value

    def to_fp32(self, value: Any) -> Any:
        """The value in fp32, if it is a tensor, or a list of tensors, of half precision."""
        kind = type(value)
        if kind in _SCALARS:
            return value
        if kind is list or kind is tuple:
            return kind([self.to_fp32(item) for item in value])
        if isinstance(value, Tensor) and value.dtype in HALVES and self.concerns(value):
            return value.float()
        return value

    def product_dtype(self, tensor: Tensor) -> torch.dtype | None:
        """For `helpers.lab.precision`: the type in which a product with this tensor would run."""
        if not self.settings.enabled:
            return None
        with torch._C.DisableTorchFunction():
            return self.low if tensor.dtype in CASTABLE and self.concerns(tensor) else None

    def suspended(self) -> Any:
        """For `helpers.lab.precision`: a region in which nothing is cast."""
        return type(self.settings)(enabled=False)

    def concerns(self, tensor: Tensor) -> bool:
        return self.device_type is None or tensor.device.type == self.device_type

    def remember_for_recomputation(self) -> None:
        """Let a checkpoint that has begun inside the outermost region recompute under the settings of now."""
        hooks = self.hooks = _saved_tensor_hooks(True)
        if hooks is not None and hooks != self.hooks_outside:
            autocast_checkpoint.bind_frame(hooks[0], self.settings)


def refuse_to_compile() -> None:
    raise RuntimeError(
        "Autocast works call by call, in Python, and can't be traced by torch.compile. Use torch.autocast around or "
        "inside compiled functions, or keep what runs under Autocast out of them with torch.compiler.disable."
    )


# What torch.compiler.assume_constant_result does, without importing the compiler: called while tracing, not traced.
# An error raised by traced code would make the compiler fall back to eager in silence.
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


low, fp32 = _casting(CastingMode.to_low), _casting(CastingMode.to_fp32)


def fp32_result(mode: CastingMode, func: Callable, args: tuple, kwargs: dict | None) -> Any:
    kwargs = kwargs or {}
    first = args[0] if args else kwargs.get("input", kwargs.get("A", kwargs.get("x")))
    asked = kwargs.get("out") is not None or kwargs.get("dtype") is not None
    if asked or not isinstance(first, Tensor) or first.dtype not in HALVES or not mode.concerns(first):
        return func(*args, **kwargs)
    if any(type(value) is torch.dtype for value in args):
        return func(*args, **kwargs)
    return func(*args, **(kwargs | {"dtype": torch.float32}))


def promote(mode: CastingMode, func: Callable, args: tuple, kwargs: dict | None) -> Any:
    kwargs = kwargs or {}
    if kwargs.get("out") is None:
        found = {tensor.dtype for tensor in _tensors([*args, *kwargs.values()]) if mode.concerns(tensor)}
        if len(found & CASTABLE) > 1:
            return fp32(mode, func, args, kwargs)
    return func(*args, **kwargs)


def refuse(mode: CastingMode, func: Callable, args: tuple, kwargs: dict | None) -> Any:
    if not any(mode.concerns(tensor) for tensor in _tensors([*args, *(kwargs or {}).values()])):
        return func(*args, **(kwargs or {}))
    raise RuntimeError(
        f"{func.__name__} isn't safe in half precision: a probability that rounds to 0 or 1 has an infinite loss. "
        "Give the logits to binary_cross_entropy_with_logits (BCEWithLogitsLoss), or compute it in fp32 under "
        "Autocast(enabled=False)."
    )


def look_inside(mode: CastingMode, func: Callable, args: tuple, kwargs: dict | None) -> Any:
    """Run a function that is written in Python with the mode on for what it calls."""
    opened = without_question(func)
    with mode:
        return opened(*args, **(kwargs or {}))


def rnn(mode: CastingMode, func: Callable, args: tuple, kwargs: dict | None) -> Any:
    cast = tuple(mode.to_low(value) for value in args)
    if not kwargs:
        autocast_rnn.flatten(func, cast, args)
    return func(*cast, **(kwargs or {}))


def set_grad_enabled(mode: CastingMode, func: Callable, args: tuple, kwargs: dict | None) -> Any:
    autocast_checkpoint.bind_context(sys._getframe(2), mode.settings)
    return func(*args, **(kwargs or {}))


def reported_dtype(mode: CastingMode, func: Callable, args: tuple, kwargs: dict | None) -> Any:
    """`tensor.dtype`; but fp32 to a check that a half-precision input fits the weights: both are about to be cast."""
    dtype = func(*args)
    if dtype in HALVES and sys._getframe(2).f_code in autocast_rnn.TYPE_CHECKS:
        return torch.float32
    return dtype


def by_device(on_cpu: Handler | None, elsewhere: Handler | None) -> Handler:
    """For a region that is not bound to a device: the list of the device of the first tensor."""

    def handler(mode: CastingMode, func: Callable, args: tuple, kwargs: dict | None) -> Any:
        first = args[0] if args else None
        if not isinstance(first, Tensor):
            first = next(_tensors([*args, *(kwargs or {}).values()]), None)
        chosen = on_cpu if first is None or first.is_cpu else elsewhere
        if chosen is None:
            return func(*args, **(kwargs or {}))
        return chosen(mode, func, args, kwargs)

    return handler


def _tensors(values: Any) -> Any:
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif type(value) in (list, tuple):
            yield from _tensors(value)


HANDLERS: dict[str, Handler] = {LOW: low, FP32: fp32, FP32_RESULT: fp32_result, PROMOTE: promote, REFUSE: refuse}
