"""Recurrent layers under `Autocast`: one call in C++ for all steps, with its weights in a list."""

import operator
from collections.abc import Callable

import torch
import torch.backends.cudnn.rnn
from torch import Tensor, nn

# These functions compare the input's type with the weights' before the call whose inputs are cast.
TYPE_CHECKS = frozenset({nn.RNNBase.check_input.__code__})

# The functions, their names for cuDNN and how many gates their weights hold.
FUNCTIONS = {"lstm": ("LSTM", 4), "gru": ("GRU", 3), "rnn_tanh": ("RNN_TANH", 1), "rnn_relu": ("RNN_RELU", 1)}


def flatten(func: Callable, cast: tuple, original: tuple) -> None:
    """Lay the cast weights out in one buffer, as cuDNN wants them, once a region.

    `nn.RNNBase.flatten_parameters` does the same for the weights themselves. Without it cuDNN copies them in each call
    and warns. Costs one more pass over the cast weights.
    """
    weights, has_biases, layers, bidirectional, batch_first = _read(cast)
    untouched = _read(original)[0]
    if not all(weight.is_cuda and torch.backends.cudnn.is_acceptable(weight) for weight in weights):
        return
    if any(map(operator.is_, weights, untouched)) or not torch._use_cudnn_rnn_flatten_weight():
        return
    if len({weight.untyped_storage().data_ptr() for weight in weights}) == 1:  # done by an earlier call
        return
    name, gates = FUNCTIONS[func.__name__]
    hidden = weights[0].size(0) // gates
    projection = weights[1].size(1) if weights[1].size(1) != hidden else 0
    tensors_a_layer = (4 if has_biases else 2) + (projection > 0)
    code = torch.backends.cudnn.rnn.get_cudnn_mode(name)
    sizes = (weights[0].size(1), code, hidden, projection, layers, batch_first, bidirectional)
    with torch.no_grad(), torch.cuda.device_of(weights[0]):
        torch._cudnn_rnn_flatten_weight(weights, tensors_a_layer, *sizes)


def _read(args: tuple) -> tuple[list[Tensor], bool, int, bool, bool]:
    """Weights and settings of `lstm(input, state, weights, has_biases, layers, dropout, training, bidirectional,
    batch_first)`, or of its form for packed sequences, which has the batch sizes second and no `batch_first`."""
    if isinstance(args[3], bool):
        return list(args[2]), args[3], args[4], args[7], args[8]
    return list(args[3]), args[4], args[5], args[8], False
