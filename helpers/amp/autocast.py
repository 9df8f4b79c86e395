"""`Autocast`: mixed precision for a region of code, implemented in Python.

A `TorchFunctionMode` intercepts every call of torch's Python interface (functions, methods, operators) in its thread,
above autograd, so that casts are differentiated like any operation. (A `TorchDispatchMode` is below autograd: casts
there would not be differentiated, and gradients would have the wrong type.) For each call it looks up the function,
casts its inputs, and runs it.

The types are torch.autocast's lists for the CPU and for CUDA, in `autocast_policy.toml`. The names are those of the
operators behind torch's functions (`linalg_qr` is `torch.linalg.qr`). Operations on no list run in the type of their
inputs. CUDA's lists are used for every other accelerator, too.
"""

import contextlib
import functools
import threading
import tomllib
import types
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

_compiling = torch.compiler.is_dynamo_compiling

HALVES = (torch.float16, torch.bfloat16)
CASTABLE = frozenset({*HALVES, torch.float32})

LOW = "low precision"  # inputs are cast to the region's type; a weight is cast once a region
FP32 = "fp32"  # inputs are cast to fp32
FP32_RESULT = "fp32 result"  # summed and returned in fp32, unless a dtype is asked for
PROMOTE = "promote"  # inputs are cast to fp32 if one of them is fp32
REFUSE = "refused"  # an error: half precision is not safe for it
# torch's own autocast casts: operators that call listed ones, and cuDNN's recurrent layers with weights in one buffer
TORCHS = "torch's"
_POLICIES = {name: name for name in (LOW, FP32, FP32_RESULT, PROMOTE, REFUSE, TORCHS)}  # they are compared by identity

_OPERATORS = {
    "matmul": ("__matmul__", "__rmatmul__"),
    "pow": ("__pow__", "__rpow__"),
    "reciprocal": ("__rdiv__", "__rtruediv__"),
}
_NAMESPACES = (torch, Tensor, F, torch._C._nn, torch._C._VariableFunctions)
_QUESTIONS = {"has_torch_function", "has_torch_function_unary", "has_torch_function_variadic"}


class Autocast(contextlib.ContextDecorator):
    """Run matrix products, convolutions and attention in `dtype`, and operations that need range or precision in fp32.

    A context manager for the forward pass and the loss, or a decorator:

        with Autocast(torch.bfloat16):
            loss = criterion(model(x), target)
        loss.backward()

    `autocast_policy.toml` says which: networks run in the same types as under torch.autocast, on a GPU and on a CPU.
    `device_type` restricts it to one kind of device. In-place and out= variants, fp64 and integers are left alone.
    Casts are differentiated, so gradients have the types of their parameters. With `cache_enabled` an fp32 weight is
    cast once, until the outermost region ends or the weight changes.

    Regions nest, with other settings or `enabled=False` inside, and belong to one thread. The settings are stored where
    torch.autocast stores its own. So a `torch.autocast` inside has its effect, and models see that autocast is on (some
    then leave it for their rotary angles); `torch.compile` and `torch.utils.checkpoint` compile, and recompute after
    the region, under torch's own autocast with these settings. It also casts cuDNN's recurrent layers. During every
    other call it is off. An operator that is called as `torch.ops.aten.mm` isn't cast.

    The overhead is some microseconds of Python for each call of a torch function, and less for each access to a
    property (`x.shape`). It is hidden where the GPU is the bottleneck.
    """

    def __init__(
        self,
        dtype: torch.dtype = torch.float16,
        enabled: bool = True,
        device_type: str | None = None,
        cache_enabled: bool = True,
    ) -> None:
        if enabled and dtype not in HALVES:
            raise ValueError(f"Autocast: dtype must be torch.float16 or torch.bfloat16, not {dtype}")
        self.dtype, self.enabled, self.device_type, self.cache_enabled = dtype, enabled, device_type, cache_enabled

    def __call__(self, function: Callable) -> Callable:
        if not callable(function):
            raise TypeError(f"Autocast decorates a function, not a {type(function).__name__}")
        return super().__call__(function)

    def __enter__(self) -> "Autocast":
        if _compiling():
            torch._dynamo.graph_break(msg="Autocast is entered outside of the compiled graph")
        region = self._region()
        region.__enter__()
        _entered.regions.append(region)
        return self

    def __exit__(self, *exception: Any) -> None:
        _entered.regions.pop().__exit__(*exception)

    @contextlib.contextmanager
    def _region(self) -> Iterator[None]:
        accelerator = torch.accelerator.current_accelerator()
        kinds = {self.device_type} if self.device_type else {"cpu", accelerator.type if accelerator else "cpu"}
        before = [(kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in kinds]
        cached_before = torch.is_autocast_cache_enabled()
        torch.autocast_increment_nesting()
        try:
            for kind in kinds:
                torch.set_autocast_enabled(kind, self.enabled)
                torch.set_autocast_dtype(kind, self.dtype)
            torch.set_autocast_cache_enabled(self.cache_enabled)
            with contextlib.nullcontext() if not self.enabled or _is_casting() else _Casting():
                yield
        finally:
            for kind, enabled, dtype in before:
                torch.set_autocast_enabled(kind, enabled)
                torch.set_autocast_dtype(kind, dtype)
            torch.set_autocast_cache_enabled(cached_before)
            if torch.autocast_decrement_nesting() == 0:
                torch.clear_autocast_cache()


class _Entered(threading.local):
    """This thread's nested regions, outermost first."""

    def __init__(self) -> None:
        self.regions: list[contextlib.AbstractContextManager] = []


_entered = _Entered()


def _is_casting() -> bool:
    stack = range(torch._C._len_torch_function_stack())
    return any(isinstance(torch._C._get_function_stack_at(depth), _Casting) for depth in stack)


_PROPERTY = type(Tensor.shape.__get__)
_CAST = {torch.float16: Tensor.half, torch.bfloat16: Tensor.bfloat16, torch.float32: Tensor.float}  # quicker than `to`


class _Casting(TorchFunctionMode):
    """Casts the inputs of calls, from the beginning of a thread's outermost region to its end."""

    def __init__(self) -> None:
        super().__init__()
        self.policies, self.bodies = policies(), bodies()
        self.casts: dict[tuple, tuple] = {}  # (weight's id, type) → (weight, its version, has the cast a graph, cast)

    def __torch_function__(self, func: Callable, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = kwargs or {}
        if _compiling() or type(func) is _PROPERTY:
            return func(*args, **kwargs)
        if func in self.bodies:
            with self:
                return self.bodies[func](*args, **kwargs)
        if (by_kind := self.policies.get(func)) is not None:
            first = args[0] if args and isinstance(args[0], Tensor) else next(_tensors(args, kwargs), None)
            kind = "cpu" if first is None or first.is_cpu else first.device.type
            policy = by_kind.get("cpu" if kind == "cpu" else "cuda")
            if policy is TORCHS:
                return func(*args, **kwargs)
            if policy is not None and kwargs.get("out") is None and _is_enabled(kind):
                args, kwargs = self.cast(policy, kind, first, args, kwargs)
        with torch._C._DisableAutocast():  # torch's own casts
            return func(*args, **kwargs)

    def cast(self, policy: str, kind: str, first: Tensor | None, args: tuple, kwargs: dict) -> tuple[tuple, dict]:
        """The arguments of a call on this kind of device, cast by its policy."""
        if policy is PROMOTE and len(CASTABLE & {tensor.dtype for tensor in _tensors(args, kwargs)}) < 2:
            return args, kwargs
        if policy in (LOW, FP32, PROMOTE):
            dtype, on_cpu = torch.get_autocast_dtype(kind) if policy is LOW else torch.float32, kind == "cpu"
            args = [self.to(dtype, on_cpu, value) for value in args]
            return args, kwargs and {name: self.to(dtype, on_cpu, value) for name, value in kwargs.items()}
        if policy is REFUSE:
            raise RuntimeError(
                "binary_cross_entropy isn't safe in half precision: a probability that rounds to 0 or 1 has an "
                "infinite loss. Use binary_cross_entropy_with_logits on what goes into the sigmoid."
            )
        asked = kwargs.get("dtype") or any(isinstance(value, torch.dtype) for value in args)
        return args, kwargs if asked or first.dtype not in HALVES else kwargs | {"dtype": torch.float32}

    def to(self, dtype: torch.dtype, on_cpu: bool, value: Any) -> Any:
        """An argument, with tensors that are to be cast (also in lists and tuples) in a type."""
        if not isinstance(value, Tensor):
            is_list = type(value) in (list, tuple)
            return type(value)([self.to(dtype, on_cpu, item) for item in value]) if is_list else value
        if value.dtype is dtype or value.dtype not in CASTABLE or value.is_cpu is not on_cpu:
            return value
        if value.dtype is not torch.float32 or not value.requires_grad or not torch.is_autocast_cache_enabled():
            return _CAST[dtype](value)
        weight, version, has_graph, cast = self.casts.get((id(value), dtype), (None, None, False, None))
        # `_version` counts in-place changes. A cast without a graph would lose the weight's gradient.
        if weight is None or version != value._version or torch.is_grad_enabled() > has_graph:
            cast = _CAST[dtype](value)
            if value.is_leaf and not value._is_view() and not value.is_inference():
                self.casts[id(value), dtype] = value, value._version, torch.is_grad_enabled(), cast
        return cast


def _is_enabled(kind: str) -> bool:
    return (kind in ("cpu", "cuda") or torch.amp.is_autocast_available(kind)) and torch.is_autocast_enabled(kind)


def _tensors(values: Iterable[Any], kwargs: Mapping[str, Any] | None = None) -> Iterator[Tensor]:
    for value in (*values, *(kwargs or {}).values()):
        if isinstance(value, Tensor):
            yield value
        elif type(value) in (list, tuple):
            yield from _tensors(value)


@functools.cache
def policies() -> dict[Callable, dict[str, str]]:
    """Function → policy by kind of device, "cpu" or "cuda". Takes some milliseconds, once a process."""
    by_function: dict[Callable, dict[str, str]] = {}
    lists = tomllib.loads(Path(__file__).with_name("autocast_policy.toml").read_text(encoding="utf-8"))
    for kind in ("cpu", "cuda"):
        for policy, names in (*lists["both"].items(), *lists[kind].items()):
            for function in _functions(names):
                by_function.setdefault(function, {})[kind] = _POLICIES[policy]
    return by_function


def _functions(names: str) -> set[Callable]:
    """The Python functions, methods and operators of torch's operators."""
    functions = []
    for name in names.split():
        functions += [getattr(namespace, name, None) for namespace in _NAMESPACES]
        functions += [getattr(Tensor, operator) for operator in _OPERATORS.get(name, ())]
        room, _, rest = name.partition("_")
        if room in ("linalg", "fft", "special"):
            functions += [getattr(getattr(torch, room), rest), getattr(getattr(torch._C, f"_{room}"), name)]
    return {function for function in functions if callable(function)}


@functools.cache
def bodies() -> dict[Callable, Callable]:
    """Unlisted function of torch that is written in Python and calls listed ones → its body.

    `F.multi_head_attention_forward` begins with `if has_torch_function(...)`, and in a mode calls the mode instead of
    running. The copy has the same code and globals, but there `has_torch_function` is always false, so it runs.
    """
    listed = {function.__name__ for function in policies()}
    copies = {}
    for namespace in (torch, torch.functional, F, Tensor):
        for function in vars(namespace).values():
            if not isinstance(function, types.FunctionType) or function in policies():
                continue
            mentions = set(function.__code__.co_names)
            if mentions & listed and (asks := mentions & _QUESTIONS):
                names = function.__globals__ | dict.fromkeys(asks, lambda *_: False)
                body = types.FunctionType(function.__code__, names, function.__name__, function.__defaults__)
                body.__kwdefaults__ = function.__kwdefaults__
                copies[function] = body
    return copies
