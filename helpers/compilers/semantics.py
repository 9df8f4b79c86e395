"""Whether what was captured does what the function does.

    measure_semantics("branch on data", "torch.jit.trace")
    {"specimen": "branch on data", "way": "torch.jit.trace", "outcome": "wrong, with a warning", …}

A specimen is captured with its example, then called with it, then with arguments (or in a mode, or with a setting)
that take the function another way. What a call does is all that its caller can see: what it returns or that it
raises, what it prints, what it leaves in a list, what its arguments are afterwards. Each call is made after the same
seed, and compared with the same call of the plain function.
"""

import contextlib
import copy
import dataclasses
import io
import linecache
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from helpers.lab.records import STATUS

from . import capture, our_lib, specimens, words
from .backends import inductor
from .specimens import SPECIMENS, Case

RIGHT, SILENT, WARNED = "right", "silently wrong", "wrong, with a warning"
REFUSES, BREAKS, RECOMPILES = "refuses", "breaks the graph", "recompiles"
OUTCOMES = (RIGHT, RECOMPILES, BREAKS, REFUSES, WARNED, SILENT)

CPU = torch.device("cpu")  # where all specimens' tensors lie
SEED = 20
_OLD = "deprecated"  # that a whole way is deprecated says nothing about a function


@dataclasses.dataclass
class Seen:
    """What a caller sees of a call."""

    output: Any
    raised: Exception | None
    printed: str
    log: list[str]
    arguments: tuple[Any, ...]

    def same(self, other: "Seen") -> bool:
        if self.raised is not None or other.raised is not None:
            return self.raised is not None and other.raised is not None
        return all(same(getattr(self, of), getattr(other, of)) for of in ("output", "printed", "log", "arguments"))


def ways(specimen: str) -> list[str]:
    """The ways that a specimen can be captured by: a repaired version exists only of some."""
    case = _make(specimen)
    return list(capture.WAYS) + [capture.REPAIRED] * (case.repaired is not None)


def measure_semantics(specimen: str, way: str) -> dict[str, Any]:
    """Capture a specimen by a way, call it, and say what came of it.

    `outcome` is one of `OUTCOMES`; `when` is where it refused, at capture or at a later call; `said` is what torch said
    in a line, and `line` the line of code that it names; `graphs`, `breaks` and `recompiles` count: breaks in the
    example's call, recompilations because of a guard that failed later. Costs some milliseconds (a second where
    torch.export is strict; some seconds where inductor compiles). Where a machine has nothing for inductor to compile
    by, which says nothing of the specimen, the row has a `status` in place of an outcome.
    """
    if way not in ways(specimen):
        raise ValueError(f"way is {way!r}; of {specimen!r} there are: {', '.join(ways(specimen))}")
    if way == capture.INDUCTOR and (lacking := inductor.missing(CPU)):
        return {"specimen": specimen, "way": way, STATUS: lacking}
    with torch.random.fork_rng(devices=[]):
        return _measure(specimen, way)


def _measure(specimen: str, way: str) -> dict[str, Any]:
    expected = _calls(plain := _make(specimen), plain.fn)
    with capture.alone(), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        case = _make(specimen)
        files = {our_lib.__file__, specimens.__file__}
        row = {"specimen": specimen, "way": way, "when": "", "said": "", "line": "", "graphs": 0}
        row |= {"breaks": 0, "recompiles": 0}
        try:
            captured = _capture(case, way)
        except Exception as error:
            return row | {"outcome": REFUSES, "when": "capture"} | _of_error(error, files) | {"warnings": 0}
        found = _calls(case, captured)
        heard = [warning for warning in caught if _OLD not in str(warning.message)]
        row |= {"graphs": 1} | (_dynamo_counts(specimen, way) if way in capture.BY_DYNAMO else {})
    row["warnings"] = len(heard)
    refused = next((s.raised for s, e in zip(found, expected, strict=True) if s.raised and not e.raised), None)
    if refused is not None:
        at_capture = way in capture.BY_DYNAMO and found[0].raised is refused
        row |= {"outcome": REFUSES, "when": "capture" if at_capture else "call"} | _of_error(refused, files)
        return row | ({"graphs": 0} if at_capture else {})
    if not all(map(Seen.same, found, expected)):
        if not heard:
            return row | {"outcome": SILENT, "said": "", "line": ""}
        return row | {"outcome": WARNED} | _of_warning(heard[0], files)
    return row | {"outcome": BREAKS if row["breaks"] else RECOMPILES if row["recompiles"] else RIGHT}


def same(found: Any, expected: Any) -> bool:
    """Whether two nested values are of the same kind and hold the same, tensors to within rounding."""
    if isinstance(expected, Tensor):
        return (
            isinstance(found, Tensor)
            and found.shape == expected.shape
            and found.dtype == expected.dtype
            and torch.allclose(found, expected, rtol=1e-5, atol=1e-7, equal_nan=True)
        )
    if dataclasses.is_dataclass(expected):
        return type(found) is type(expected) and same(vars(found), vars(expected))
    if isinstance(expected, dict):
        if not isinstance(found, dict) or found.keys() != expected.keys():
            return False
        return all(same(found[key], expected[key]) for key in expected)
    if isinstance(expected, (tuple, list)):
        return type(found) is type(expected) and len(found) == len(expected) and all(map(same, found, expected))
    return bool(found == expected)


def _make(specimen: str) -> Case:
    if specimen not in SPECIMENS:
        raise ValueError(f"specimen is {specimen!r}; there are: {', '.join(SPECIMENS)}")
    return SPECIMENS[specimen]()


def _capture(case: Case, way: str) -> Callable[..., Any]:
    """What there is to call; what capturing left in the list is forgotten."""
    example = copy.deepcopy(case.example)
    if way == capture.REPAIRED:
        captured = capture.exported(case.repaired, example, dynamic=case.dynamic).module()
    else:
        captured = capture.WAYS[way](case.fn, example)
    case.log.clear()
    return captured


def _calls(case: Case, fn: Callable[..., Any]) -> list[Seen]:
    """A call with the example, what happens between, a call with the other arguments."""
    first = _call(case, fn, case.example)
    try:
        case.between(fn)
    except Exception as error:  # what was captured may not have another mode
        return [first, dataclasses.replace(first, raised=error)]
    return [first, _call(case, fn, case.other)]


def _call(case: Case, fn: Callable[..., Any], arguments: tuple[Any, ...]) -> Seen:
    arguments = copy.deepcopy(arguments)
    case.log.clear()
    output, raised = None, None
    torch.manual_seed(SEED)
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        try:
            output = fn(*arguments)
        except Exception as error:
            raised = error
    return Seen(copy.deepcopy(output), raised, printed.getvalue(), list(case.log), arguments)


def _dynamo_counts(specimen: str, way: str) -> dict[str, Any]:
    """How often Dynamo compiled again in the calls so far, and where it breaks the function in the example's call."""
    from torch._dynamo.utils import get_compilation_metrics

    reasons = [metrics.recompile_reason for metrics in get_compilation_metrics() if metrics.recompile_reason]
    row: dict[str, Any] = {"recompiles": len(reasons)}
    if reasons:
        row["said"] = words.first_line(reasons[0].partition(": ")[2])
    if way == capture.FULLGRAPH:  # which breaks nowhere, or refuses
        return row
    case = _make(specimen)
    explained = torch._dynamo.explain(case.fn)(*case.example)
    row |= {"graphs": explained.graph_count, "breaks": len(explained.break_reasons)}
    if not row["breaks"]:
        return row
    first = explained.break_reasons[0]
    line = (first.user_stack[-1].line or "").strip()
    return row | {"said": _refusal(specimen) or words.first_line(first.reason), "line": line}


def _refusal(specimen: str) -> str:
    """What Dynamo says when it may not break the graph: more than the reason that it keeps of a break."""
    torch._dynamo.reset()
    case = _make(specimen)
    refused = _call(case, capture.WAYS[capture.FULLGRAPH](case.fn, case.example), case.example).raised
    return words.of_error(refused) if refused else ""


def _of_error(error: Exception, files: set[str]) -> dict[str, str]:
    return {"said": words.of_error(error), "line": words.line_of_error(error, files)}


def _of_warning(warning: warnings.WarningMessage, files: set[str]) -> dict[str, str]:
    line = linecache.getline(warning.filename, warning.lineno).strip() if warning.filename in files else ""
    return {"said": words.of_warning(warning), "line": line}
