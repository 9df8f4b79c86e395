"""Which type each operation runs in: torch.autocast's lists for the CPU and for CUDA, from `autocast_policy.toml`.

The names are those of the operators behind torch's functions (`linalg_qr` is `torch.linalg.qr`). Operations on no list
run in the type of their inputs. CUDA's lists are used for every other accelerator, too.
"""

import functools
import tomllib
import types
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

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


@functools.cache
def policies() -> dict[Callable, dict[str, str]]:
    """Function → policy by kind of device, "cpu" or "cuda". Takes some milliseconds, once a process."""
    by_function: dict[Callable, dict[str, str]] = {}
    lists = tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))
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


_QUESTIONS = {"has_torch_function", "has_torch_function_unary", "has_torch_function_variadic"}
