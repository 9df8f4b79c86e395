"""How a Python mode sees what torch's own Python functions call.

`F.multi_head_attention_forward` begins by asking `has_torch_function(...)`, and, inside a mode, hands itself to
the mode instead of running. Run from within the mode it would either be handed over again, for ever, or, with the
mode off, its products would pass unseen. So a copy is run whose global names are the original's, except
that this question is answered with no. The original stays as it is, and so does its module.
"""

import functools
import types
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

_QUESTIONS = ("has_torch_function", "has_torch_function_unary", "has_torch_function_variadic")


# Functions in which nothing is cast, so that there is no need to look: the common ones, for speed.
_QUIET = """
    __contains__ __format__ __iter__ __len__ __repr__ __reversed__ __rsub__ adaptive_avg_pool1d adaptive_avg_pool2d
    alpha_dropout batch_norm broadcast_tensors celu dropout dropout1d dropout2d dropout3d elu embedding embedding_bag
    feature_alpha_dropout fold glu hardsigmoid hardswish hardtanh instance_norm leaky_relu max_pool1d max_pool2d mish
    relu relu6 rrelu selu sigmoid silu tanh threshold unfold
"""


def python_functions() -> Iterator[Callable]:
    """The functions of torch, torch.nn.functional and Tensor that ask for a mode by one of these names."""
    for namespace in (torch, torch.functional, torch.nn.functional, Tensor):
        for name in set(dir(namespace)).difference(_QUIET.split()):
            if isinstance(found := getattr(namespace, name, None), types.FunctionType) and _asks(found):
                yield found


def _asks(function: types.FunctionType) -> bool:
    """Not those that ask `torch.overrides` itself, where our answer doesn't reach, nor those that call `super()`:
    a wrapper and what it wraps (`Tensor.split`) are one function to a mode, and nothing in them is cast."""
    names = set(function.__code__.co_names)
    return not names.isdisjoint(_QUESTIONS) and names.isdisjoint({"overrides", "super"})


@functools.cache
def without_question(function: types.FunctionType) -> types.FunctionType:
    """A copy that doesn't ask. It looks up names in its module as they are at each call."""
    copy = types.FunctionType(
        function.__code__, _Names(function.__globals__), function.__name__, function.__defaults__, function.__closure__
    )
    copy.__kwdefaults__ = function.__kwdefaults__
    return copy


class _Names(dict):
    """A module's names, with our answer to the questions before them."""

    def __init__(self, module_names: dict) -> None:
        super().__init__(dict.fromkeys(_QUESTIONS, _no))
        self.module_names = module_names

    def __missing__(self, name: str) -> object:
        return self.module_names[name]


def _no(*_: object) -> bool:
    return False
