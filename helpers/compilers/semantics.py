"""Whether captured functions behave as the originals.

    outcome(lambda: Case(fn, example, other), torch.jit.trace)         # "wrong, with a warning"

A case is captured with its example, then called with it, then with other arguments that lead to another path through
the function. Compared is everything that a caller can observe: output or exception, printed text, and the arguments
after the call. Each call has the same seed as the corresponding call of the plain function.
"""

import contextlib
import copy
import dataclasses
import io
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from . import capture

RIGHT, SILENT, WARNED, REFUSES = "right", "silently wrong", "wrong, with a warning", "refuses"

SEED = 20


Observed = tuple[Any, ...]  # of a call: output, printed text, arguments afterwards; () if it raised


@dataclasses.dataclass(frozen=True)
class Case:
    """A function, the arguments that it is captured with, and others that lead to another path through it."""

    fn: Callable[..., Any]
    example: tuple[Any, ...]
    other: tuple[Any, ...]


def outcome(make: Callable[[], Case], capturing: capture.Capture) -> str:
    """`RIGHT`, `REFUSES`, `WARNED` or `SILENT`: whether `capturing(fn, example)` returns a function that does the same.

    `make` makes the case anew, for a call may change its state.
    """
    with torch.random.fork_rng(devices=[]), capture.isolated():
        return _outcome(make, capturing)


def _outcome(make: Callable[[], Case], capturing: capture.Capture) -> str:
    expected = _calls(plain := make(), plain.fn)
    case = make()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            captured = capturing(case.fn, copy.deepcopy(case.example))
        except Exception:
            return REFUSES
        calls = _calls(case, captured)
    if any(error and not plain_error for (_, error), (_, plain_error) in zip(calls, expected, strict=True)):
        return REFUSES
    if same([observed for observed, _ in calls], [observed for observed, _ in expected]):
        return RIGHT
    # what is deprecated isn't about the case
    return WARNED if any("deprecated" not in str(warning.message) for warning in caught) else SILENT


def same(result: Any, expected: Any) -> bool:
    """Whether two values, tuples or lists have the same types and contents, tensors to within rounding."""
    if isinstance(expected, Tensor):
        return (
            isinstance(result, Tensor)
            and result.shape == expected.shape
            and result.dtype == expected.dtype
            and torch.allclose(result, expected, rtol=1e-5, atol=1e-7, equal_nan=True)
        )
    if isinstance(expected, (tuple, list)):
        return type(result) is type(expected) and len(result) == len(expected) and all(map(same, result, expected))
    return bool(result == expected)


def _calls(case: Case, fn: Callable[..., Any]) -> list[tuple[Observed, Exception | None]]:
    return [_call(fn, case.example), _call(fn, case.other)]


def _call(fn: Callable[..., Any], arguments: tuple[Any, ...]) -> tuple[Observed, Exception | None]:
    arguments = copy.deepcopy(arguments)
    torch.manual_seed(SEED)
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        try:
            output = fn(*arguments)
        except Exception as error:
            return (), error
    return copy.deepcopy((output, printed.getvalue(), arguments)), None
