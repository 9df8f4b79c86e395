"""What `Autocast` has to know of torch's internals: functions written in Python, checkpoints, recurrent layers.

Nothing of torch is changed: functions are copied, and a checkpoint's own record is written to.
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

# Functions written in Python. `F.multi_head_attention_forward` begins by asking `has_torch_function(...)`, and, inside
# a mode, hands itself to the mode instead of running. Run from within the mode it would either be handed over again,
# for ever, or, with the mode off, its products would pass unseen. So a copy is run whose global names are the
# original's, except that this question is answered with no.

_QUESTIONS = ("has_torch_function", "has_torch_function_unary", "has_torch_function_variadic")

# Functions in which nothing is cast, so that there is no need to look: the common ones, for speed.
_NOTHING_CAST = """
    __contains__ __format__ __iter__ __len__ __repr__ __reversed__ __rsub__ adaptive_avg_pool1d adaptive_avg_pool2d
    alpha_dropout batch_norm broadcast_tensors celu dropout dropout1d dropout2d dropout3d elu embedding embedding_bag
    feature_alpha_dropout fold glu hardsigmoid hardswish hardtanh instance_norm leaky_relu max_pool1d max_pool2d mish
    relu relu6 rrelu selu sigmoid silu tanh threshold unfold
"""


def python_functions() -> Iterator[Callable]:
    """The functions of torch, torch.nn.functional and Tensor that ask for a mode by one of these names."""
    for namespace in (torch, torch.functional, torch.nn.functional, Tensor):
        for name in set(dir(namespace)).difference(_NOTHING_CAST.split()):
            function = getattr(namespace, name, None)
            if isinstance(function, types.FunctionType) and _asks(function):
                yield function


def _asks(function: types.FunctionType) -> bool:
    """Not those that ask `torch.overrides` itself, where our answer doesn't reach, nor those that call `super()`:
    a wrapper and what it wraps (`Tensor.split`) are one function to a mode, and nothing in them is cast."""
    names = set(function.__code__.co_names)
    return not names.isdisjoint(_QUESTIONS) and names.isdisjoint({"overrides", "super"})


@functools.cache
def without_question(function: types.FunctionType) -> types.FunctionType:
    """A copy that doesn't ask. It looks up names in its module as they are at each call."""
    names = _Names(function.__globals__)
    copy = types.FunctionType(function.__code__, names, function.__name__, function.__defaults__, function.__closure__)
    copy.__kwdefaults__ = function.__kwdefaults__
    return copy


class _Names(dict):
    """A module's names, with our answer to the questions before them."""

    def __init__(self, module_names: dict) -> None:
        super().__init__(dict.fromkeys(_QUESTIONS, lambda *_: False))
        self.module_names = module_names

    def __missing__(self, name: str) -> object:
        return self.module_names[name]


# Checkpoints. `torch.utils.checkpoint` restores torch's own autocast for the second run, which knows nothing of ours,
# and there is no call in backward, outside any region, that a mode would see. So the function that a checkpoint has
# kept for its second run is bound to the settings of the first, while the first runs. Where a version of torch keeps it
# elsewhere, nothing is bound: the recomputation then differs from the forward, which the not reentrant checkpoint
# notices and reports.

_FRAMES_UP = 5


def bind_checkpoint_of_hook(pack_hook: Callable, settings: Any) -> None:
    """Not reentrant: the function runs under saved-tensor hooks, whose closure holds the checkpoint's frame."""
    names = getattr(getattr(pack_hook, "__code__", None), "co_freevars", ())
    if getattr(pack_hook, "__module__", None) == checkpoint.__name__ and "frame" in names:
        _bind_once(pack_hook.__closure__[names.index("frame")].cell_contents, "recompute_fn", settings)


def bind_checkpoint_of_caller(caller: FrameType | None, settings: Any) -> None:
    """Reentrant: an autograd function runs it with gradients turned off, the one call in there that a mode sees. The
    function is in its context, a few callers up from that call."""
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
    """Lay the cast weights out in one buffer, as cuDNN wants them, once a region.

    `nn.RNNBase.flatten_parameters` does the same for the weights themselves. Without it cuDNN copies them in each call
    and warns. Costs one more pass over the cast weights.
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
