"""torch's internals for `Autocast`: functions written in Python, checkpoints, recurrent layers.

torch isn't patched: functions are copied, and attributes of single checkpoints are set.
"""

import functools
import operator
import types
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

import torch
import torch.backends.cudnn.rnn
from torch import Tensor, nn
from torch.utils import checkpoint

# Functions written in Python. `F.multi_head_attention_forward` begins with `if has_torch_function(...)`, and inside a
# mode calls the mode instead of running. If the mode called it again, it would recurse; with the mode off, its products
# would not be intercepted. So the mode runs a copy with the original's globals, except that `has_torch_function` is
# always false.

_QUESTIONS = ("has_torch_function", "has_torch_function_unary", "has_torch_function_variadic")

# Common functions in which nothing is cast, which are skipped for speed.
_NOTHING_CAST = """
    __contains__ __format__ __iter__ __len__ __repr__ __reversed__ __rsub__ adaptive_avg_pool1d adaptive_avg_pool2d
    alpha_dropout batch_norm broadcast_tensors celu dropout dropout1d dropout2d dropout3d elu embedding embedding_bag
    feature_alpha_dropout fold glu hardsigmoid hardswish hardtanh instance_norm leaky_relu max_pool1d max_pool2d mish
    relu relu6 rrelu selu sigmoid silu tanh threshold unfold
"""


def python_functions() -> Iterator[Callable]:
    """The functions of torch, torch.nn.functional and Tensor that call one of `_QUESTIONS`."""
    for namespace in (torch, torch.functional, torch.nn.functional, Tensor):
        for name in set(dir(namespace)).difference(_NOTHING_CAST.split()):
            function = getattr(namespace, name, None)
            if isinstance(function, types.FunctionType) and _asks(function):
                yield function


def _asks(function: types.FunctionType) -> bool:
    """Whether it calls one of `_QUESTIONS` as a global. Not if through `torch.overrides`, which a copy's globals don't
    replace, nor if it calls `super()`: to a mode, a wrapper and its wrapped method (`Tensor.split`) are the same
    function, and nothing in them is cast."""
    names = set(function.__code__.co_names)
    return not names.isdisjoint(_QUESTIONS) and names.isdisjoint({"overrides", "super"})


@functools.cache
def without_question(function: types.FunctionType) -> types.FunctionType:
    """A copy in which `has_torch_function` is false. Other globals are looked up in its module at each call."""
    names = _Names(function.__globals__)
    copy = types.FunctionType(function.__code__, names, function.__name__, function.__defaults__, function.__closure__)
    copy.__kwdefaults__ = function.__kwdefaults__
    return copy


class _Names(dict):
    """A module's globals, with `_QUESTIONS` replaced by functions that return False."""

    def __init__(self, module_names: dict) -> None:
        super().__init__(dict.fromkeys(_QUESTIONS, lambda *_: False))
        self.module_names = module_names

    def __missing__(self, name: str) -> object:
        return self.module_names[name]


# Checkpoints. For the recomputation `torch.utils.checkpoint` restores torch's autocast, but not ours, and backward is
# outside any region, where no mode intercepts its calls. So, during the forward, the function that the checkpoint has
# stored for recomputation is bound to the settings. If a version of torch stores it elsewhere, nothing is bound, and
# the recomputation differs from the forward, which the non-reentrant checkpoint reports as an error.

_FRAMES_UP = 5


def bind_checkpoint_of_hook(pack_hook: Callable, settings: Any) -> None:
    """Non-reentrant: the function runs under saved-tensor hooks, whose closure has the checkpoint's frame."""
    names = getattr(getattr(pack_hook, "__code__", None), "co_freevars", ())
    if getattr(pack_hook, "__module__", None) == checkpoint.__name__ and "frame" in names:
        _bind_once(pack_hook.__closure__[names.index("frame")].cell_contents, "recompute_fn", settings)


def bind_checkpoint_of_caller(caller: FrameType | None, settings: Any) -> None:
    """Reentrant: an autograd function runs it after turning gradients off, a call that the mode intercepts. It is in
    that autograd function's context, a few frames above `caller`."""
    for _ in range(_FRAMES_UP):
        if caller is None:
            return
        if caller.f_code is checkpoint.CheckpointFunction.forward.__code__:
            _bind_once(caller.f_locals["ctx"], "run_function", settings)
            return
        caller = caller.f_back


def _bind_once(owner: Any, attribute: str, settings: Any) -> None:
    if not hasattr(owner, "autocast_settings"):
        owner.autocast_settings = settings
        setattr(owner, attribute, settings.bind(getattr(owner, attribute)))


# Recurrent layers: one call in C++ for all steps, with its weights in a list.

# These functions compare the input's type with the weights' before the call whose inputs are cast.
RNN_TYPE_CHECKS = frozenset({nn.RNNBase.check_input.__code__})

# The functions, their names for cuDNN and how many gates their weights hold.
RNN_FUNCTIONS = {"lstm": ("LSTM", 4), "gru": ("GRU", 3), "rnn_tanh": ("RNN_TANH", 1), "rnn_relu": ("RNN_RELU", 1)}


def flatten_rnn(func: Callable, cast: tuple, original: tuple) -> None:
    """Copy the cast weights into one buffer, as cuDNN needs them, once a region.

    `nn.RNNBase.flatten_parameters` does the same for the weights themselves. Otherwise cuDNN copies them in each
    call and warns. Costs one more pass over the cast weights.
    """
    weights, has_biases, layers, bidirectional, batch_first = _rnn_arguments(cast)
    originals = _rnn_arguments(original)[0]
    if not all(weight.is_cuda and torch.backends.cudnn.is_acceptable(weight) for weight in weights):
        return
    if any(map(operator.is_, weights, originals)) or not torch._use_cudnn_rnn_flatten_weight():
        return
    if len({weight.untyped_storage().data_ptr() for weight in weights}) == 1:  # done by an earlier call
        return
    name, gates = RNN_FUNCTIONS[func.__name__]
    hidden = weights[0].size(0) // gates
    projection = weights[1].size(1) if weights[1].size(1) != hidden else 0
    tensors_a_layer = (4 if has_biases else 2) + (projection > 0)
    code = torch.backends.cudnn.rnn.get_cudnn_mode(name)
    sizes = (weights[0].size(1), code, hidden, projection, layers, batch_first, bidirectional)
    with torch.no_grad(), torch.cuda.device_of(weights[0]):
        torch._cudnn_rnn_flatten_weight(weights, tensors_a_layer, *sizes)


def _rnn_arguments(args: tuple) -> tuple[list[Tensor], bool, int, bool, bool]:
    """Weights and settings of `lstm(input, state, weights, has_biases, layers, dropout, training, bidirectional,
    batch_first)`, or of its form for packed sequences, which has the batch sizes second and no `batch_first`."""
    if isinstance(args[3], bool):
        return list(args[2]), args[3], args[4], args[7], args[8]
    return list(args[3]), args[4], args[5], args[8], False
