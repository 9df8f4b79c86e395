"""Compiled functions that don't share torch.compile's cache."""

import types
from collections.abc import Callable

import torch


def compiled_apart(function: Callable, **options) -> Callable:
    """`torch.compile(function)` with a code object of its own.

    torch keeps what it compiled with a function's code object, at most eight variants, and then runs eagerly with a log
    message. Functions measured one after another in a process may share their code, such as a class's `forward`.
    """

    def call(*inputs):
        return function(*inputs)

    copy = types.FunctionType(call.__code__.replace(), call.__globals__, "call", None, call.__closure__)
    return torch.compile(copy, **options)
