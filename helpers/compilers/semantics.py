"""Whether captured functions behave as the originals.

    measure_semantics("branch on data", "torch.jit.trace")
    {"case": "branch on data", "variant": "torch.jit.trace", "outcome": "wrong, with a warning", …}

A case is captured with its example, then called with it, then with other arguments (or in another mode, or with another
setting) that lead to another path through the function. Compared is everything that a caller can observe: output or
exception, printed text, appended list items, and the arguments after the call. Each call has the same seed as the
corresponding call of the plain function.
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

from helpers.lab.arguments import check_choice
from helpers.lab.machine import check_assertions
from helpers.lab.records import STATUS, Row

from . import backends, capture, messages
from .capture_cases import CASES, Case

RIGHT, SILENT, WARNED = "right", "silently wrong", "wrong, with a warning"
REFUSES, BREAKS, RECOMPILES = "refuses", "breaks the graph", "recompiles"
OUTCOMES = (RIGHT, RECOMPILES, BREAKS, REFUSES, WARNED, SILENT)

CPU = torch.device("cpu")  # of all cases' tensors
SEED = 20


@dataclasses.dataclass
class Observed:
    """Everything that a caller can observe of a call."""

    output: Any
    raised: Exception | None
    printed: str
    log: list[str]
    arguments: tuple[Any, ...]

    def same(self, other: "Observed") -> bool:
        if self.raised or other.raised:
            return bool(self.raised and other.raised)
        return all(same(getattr(self, of), getattr(other, of)) for of in ("output", "printed", "log", "arguments"))


def variants(case: str) -> list[str]:
    """The variants for a case; `capture.REPAIRED` only for cases with a repaired function."""
    return list(capture.VARIANTS) + [capture.REPAIRED] * (_make(case).repaired is not None)


def measure_semantics(case: str, variant: str) -> Row:
    """Capture a case by a variant, call it, and return one row about the result.

    `outcome` is one of `OUTCOMES`; `message` is torch's error, warning, reason of a graph break or failed guard in one
    line; `breaks` and `recompiles` are Dynamo's counts. Costs some milliseconds, with inductor seconds of a C++
    compiler. If inductor can't compile on this machine, the row has a `status` and no outcome.
    """
    check_assertions()  # the cases' and torch's
    check_choice(variants(case), variant=variant)
    if variant == capture.INDUCTOR and (reason := backends.missing_because(backends.COMPILE, CPU)):
        return {"case": case, "variant": variant, STATUS: reason}
    with torch.random.fork_rng(devices=[]):
        return {"case": case, "variant": variant} | _measure(case, variant)


def _measure(name: str, variant: str) -> Row:
    expected = _calls(plain := _make(name), plain.fn)
    with capture.isolated(), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        case = _make(name)
        try:
            captured = _capture(case, variant)
        except Exception as error:
            return {"outcome": REFUSES, "message": messages.named(error), "breaks": 0, "recompiles": 0}
        calls = _calls(case, captured)
        # A variant's deprecation warning isn't about the case.
        relevant = [warning for warning in caught if "deprecated" not in str(warning.message)]
        again = _make(name)
        breaks, guards = capture.dynamo_reasons(again.fn, again.example) if variant in capture.BY_DYNAMO else ([], [])
    counts = {"breaks": len(breaks), "recompiles": len(guards)}
    refused = next((c.raised for c, e in zip(calls, expected, strict=True) if c.raised and not e.raised), None)
    if refused is not None:
        return {"outcome": REFUSES, "message": messages.named(refused)} | counts
    if not all(map(Observed.same, calls, expected)):
        warned = {"outcome": WARNED, "message": messages.named(relevant[0].message)} if relevant else {}
        return {"outcome": SILENT, "message": ""} | warned | counts
    outcome = BREAKS if breaks else RECOMPILES if guards else RIGHT
    return {"outcome": outcome, "message": messages.first_line([*breaks, *guards, ""][0])} | counts


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


def _make(case: str) -> Case:
    check_choice(CASES, case=case)
    return CASES[case]()


def _capture(case: Case, variant: str) -> Callable[..., Any]:
    """A case's function, captured by a variant; clears the list that the function may have appended to."""
    example = copy.deepcopy(case.example)
    if variant == capture.REPAIRED:
        captured = capture.exported(case.repaired, example, dynamic=case.dynamic).module()
    else:
        captured = capture.VARIANTS[variant](case.fn, example)
    case.log.clear()
    return captured


def _calls(case: Case, fn: Callable[..., Any]) -> list[Observed]:
    """A call with the example, then `case.between`, then a call with the other arguments."""
    first = _call(case, fn, case.example)
    try:
        case.between(fn)
    except Exception as error:  # a captured module may not support switching its mode
        return [first, dataclasses.replace(first, raised=error)]
    return [first, _call(case, fn, case.other)]


def _call(case: Case, fn: Callable[..., Any], arguments: tuple[Any, ...]) -> Observed:
    arguments = copy.deepcopy(arguments)
    case.log.clear()
    output, raised = None, None
    torch.manual_seed(SEED)
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        try:
            output = fn(*arguments)
        except Exception as error:
            raised = error
    return Observed(copy.deepcopy(output), raised, printed.getvalue(), list(case.log), arguments)
