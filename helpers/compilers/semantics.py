"""Whether captured functions behave as the originals.

    measure_semantics("branch on data", "torch.jit.trace")
    {"case": "branch on data", "variant": "torch.jit.trace", "outcome": "wrong, with a warning"}

A case is captured with its example, then called with it, then with other arguments (or in another mode, or with another
setting) that lead to another path through the function. Compared is everything that a caller can observe: output or
exception, printed text, appended list items, and the arguments after the call. Each call has the same seed as the
corresponding call of the plain function.
"""

import contextlib
import copy
import io
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ..lab.arguments import check_choice
from ..lab.machine import check_assertions
from ..lab.rows import STATUS, Row
from . import backends, capture
from .capture_cases import CASES, Case

RIGHT, SILENT, WARNED = "right", "silently wrong", "wrong, with a warning"
REFUSES, BREAKS, RECOMPILES = "refuses", "breaks the graph", "recompiles"
OUTCOMES = (RIGHT, RECOMPILES, BREAKS, REFUSES, WARNED, SILENT)

SEED = 20


Observed = tuple[Any, ...]  # of a call: output, printed text, list items and arguments afterwards; () if it raised


def measure_semantics(case: str, variant: str) -> Row:
    """Capture a case by a variant, call it, and return one row about the result.

    `outcome` is one of `OUTCOMES`. Costs some milliseconds, with inductor seconds of a C++ compiler. If inductor can't
    compile on this machine, the row has a `status` and no outcome.
    """
    check_assertions()  # the cases' and torch's
    check_choice(CASES, case=case)
    check_choice(capture.VARIANTS, variant=variant)
    if variant == capture.INDUCTOR and (reason := backends.missing_because(backends.COMPILE, torch.device("cpu"))):
        return {"case": case, "variant": variant, STATUS: reason}
    make = CASES[case]
    with torch.random.fork_rng(devices=[]), capture.isolated():
        result, plain = _outcome(make, capture.VARIANTS[variant]), make()
        breaks, recompiles = capture.dynamo_counts(plain.fn, plain.example) if variant in capture.BY_DYNAMO else (0, 0)
    if result == RIGHT and (breaks or recompiles):
        result = BREAKS if breaks else RECOMPILES
    return {"case": case, "variant": variant, "outcome": result}


def outcome(make: Callable[[], Case], capturing: capture.Capture) -> str:
    """`RIGHT`, `REFUSES`, `WARNED` or `SILENT`: whether `capturing(fn, example)` returns a function that does the same.

    `make` makes the case anew, for a call may change its state.
    """
    with capture.isolated():
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
    """A call with the example, then `case.between`, then a call with the other arguments."""
    first = _call(case, fn, case.example)
    try:
        case.between(fn)
    except Exception as error:  # a captured module may not support switching its mode
        return [first, ((), error)]
    return [first, _call(case, fn, case.other)]


def _call(case: Case, fn: Callable[..., Any], arguments: tuple[Any, ...]) -> tuple[Observed, Exception | None]:
    arguments = copy.deepcopy(arguments)
    case.log.clear()
    torch.manual_seed(SEED)
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        try:
            output = fn(*arguments)
        except Exception as error:
            return (), error
    return copy.deepcopy((output, printed.getvalue(), case.log, arguments)), None
