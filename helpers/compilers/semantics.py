"""Whether captured functions behave as the originals; and TorchScript's deprecation warnings, with its successors.

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
import linecache
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from helpers.lab.arguments import check_choice
from helpers.lab.records import STATUS

from . import backends, capture, capture_cases, messages
from .capture_cases import CASES, Case

RIGHT, SILENT, WARNED = "right", "silently wrong", "wrong, with a warning"
REFUSES, BREAKS, RECOMPILES = "refuses", "breaks the graph", "recompiles"
OUTCOMES = (RIGHT, RECOMPILES, BREAKS, REFUSES, WARNED, SILENT)

CPU = torch.device("cpu")  # of all cases' tensors
SEED = 20
_FILES = (capture_cases.__file__,)  # rows quote lines of code from these files only

# The replacement of each call, by torch's documentation. `freeze` and `optimize_for_inference` become compilation.
SUCCESSORS = {
    "torch.jit.trace": "torch.export.export",
    "torch.jit.script": "torch.export.export, with torch.cond and while_loop",
    "torch.jit.save": "torch.export.save",
    "torch.jit.load": "torch.export.load",
    "torch.jit.freeze": "torch.compile",
    "torch.jit.optimize_for_inference": "torch.compile",
}
_ANNOUNCE = (DeprecationWarning, FutureWarning, PendingDeprecationWarning)


@dataclasses.dataclass
class Observed:
    """Everything that a caller can observe of a call."""

    output: Any
    raised: Exception | None
    printed: str
    log: list[str]
    arguments: tuple[Any, ...]

    def same(self, other: "Observed") -> bool:
        if self.raised is not None or other.raised is not None:
            return self.raised is not None and other.raised is not None
        return all(same(getattr(self, of), getattr(other, of)) for of in ("output", "printed", "log", "arguments"))


def variants(case: str) -> list[str]:
    """The variants for a case; `capture.REPAIRED` only for cases with a repaired function."""
    return list(capture.VARIANTS) + [capture.REPAIRED] * (_make(case).repaired is not None)


def measure_semantics(case: str, variant: str) -> dict[str, Any]:
    """Capture a case by a variant, call it, and return one row about the result.

    `outcome` is one of `OUTCOMES`; `when` is "capture" or "call" if it was refused; `message` is torch's error or
    warning in one line, and `line` the line of code that it names; `graphs`, `breaks` (graph breaks in the example's
    call) and `recompiles` (after failed guards) are counts. Costs some milliseconds (a second for torch.export's strict
    mode, some seconds for inductor). If inductor can't compile on this machine, the row has a `status` and no outcome.
    """
    check_choice(variants(case), variant=variant)
    if variant == capture.INDUCTOR and (reason := backends.missing_because(backends.COMPILE, CPU)):
        return {"case": case, "variant": variant, STATUS: reason}
    with torch.random.fork_rng(devices=[]):
        return _measure(case, variant)


def _measure(name: str, variant: str) -> dict[str, Any]:
    by_dynamo = variant in capture.BY_DYNAMO
    expected = _calls(plain := _make(name), plain.fn)
    with capture.isolated(), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        case = _make(name)
        row = {"case": name, "variant": variant, "when": "", "message": "", "line": "", "graphs": 0}
        row |= {"breaks": 0, "recompiles": 0}
        try:
            captured = _capture(case, variant)
        except Exception as error:
            return row | {"outcome": REFUSES, "when": "capture"} | _about_error(error) | {"warnings": 0}
        calls = _calls(case, captured)
        # A variant's deprecation warning isn't about the case.
        relevant = [warning for warning in caught if "deprecated" not in str(warning.message)]
        row |= {"graphs": 1} | (_dynamo_counts(name, variant) if by_dynamo else {})
    row["warnings"] = len(relevant)
    refused = next((c.raised for c, e in zip(calls, expected, strict=True) if c.raised and not e.raised), None)
    if refused is not None:
        at_capture = by_dynamo and calls[0].raised is refused
        row |= {"outcome": REFUSES, "when": "capture" if at_capture else "call"} | _about_error(refused)
        return row | ({"graphs": 0} if at_capture else {})
    if not all(map(Observed.same, calls, expected)):
        if not relevant:
            return row | {"outcome": SILENT, "message": "", "line": ""}
        return row | {"outcome": WARNED} | _about_warning(relevant[0])
    return row | {"outcome": BREAKS if row["breaks"] else RECOMPILES if row["recompiles"] else RIGHT}


def same(result: Any, expected: Any) -> bool:
    """Whether two nested values have the same types and contents, tensors to within rounding."""
    if isinstance(expected, Tensor):
        return (
            isinstance(result, Tensor)
            and result.shape == expected.shape
            and result.dtype == expected.dtype
            and torch.allclose(result, expected, rtol=1e-5, atol=1e-7, equal_nan=True)
        )
    if dataclasses.is_dataclass(expected):
        return type(result) is type(expected) and same(vars(result), vars(expected))
    if isinstance(expected, dict):
        if not isinstance(result, dict) or result.keys() != expected.keys():
            return False
        return all(same(result[key], expected[key]) for key in expected)
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


def _dynamo_counts(name: str, variant: str) -> dict[str, Any]:
    """Recompilations in the calls so far, and graphs and graph breaks of the example's call, by Dynamo's metrics."""
    from torch._dynamo.utils import get_compilation_metrics

    reasons = [metrics.recompile_reason for metrics in get_compilation_metrics() if metrics.recompile_reason]
    row: dict[str, Any] = {"recompiles": len(reasons)}
    if reasons:
        row["message"] = messages.first_line(reasons[0].partition(": ")[2])
    if variant == capture.FULLGRAPH:  # has no breaks: it raises instead
        return row
    case = _make(name)
    explained = torch._dynamo.explain(case.fn)(*case.example)
    row |= {"graphs": explained.graph_count, "breaks": len(explained.break_reasons)}
    if not row["breaks"]:
        return row
    first = explained.break_reasons[0]
    line = (first.user_stack[-1].line or "").strip()
    return row | {"message": _refusal(name) or messages.first_line(first.reason), "line": line}


def _refusal(name: str) -> str:
    """Dynamo's error with fullgraph=True, which is more informative than its reason for a graph break."""
    torch._dynamo.reset()
    case = _make(name)
    refused = _call(case, capture.VARIANTS[capture.FULLGRAPH](case.fn, case.example), case.example).raised
    return messages.of_error(refused) if refused else ""


def _about_error(error: Exception) -> dict[str, str]:
    return {"message": messages.of_error(error), "line": messages.source_line(error, _FILES)}


def _about_warning(warning: warnings.WarningMessage) -> dict[str, str]:
    line = linecache.getline(warning.filename, warning.lineno).strip() if warning.filename in _FILES else ""
    return {"message": messages.of_warning(warning), "line": line}


def deprecations() -> list[dict[str, str]]:
    """Call each function of TorchScript; a row for each with its deprecation warning, if any, and its successor.

    `deprecated` is "yes" if this call issued a deprecation warning that names the function.
    """
    module, x, saved = nn.Linear(2, 2).eval(), torch.zeros(1, 2), io.BytesIO()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        scripted = torch.jit.script(module)
        torch.jit.save(scripted, saved)
    calls: dict[str, Callable[[], Any]] = {
        "torch.jit.trace": lambda: torch.jit.trace(module, x),
        "torch.jit.script": lambda: torch.jit.script(module),
        "torch.jit.save": lambda: torch.jit.save(scripted, io.BytesIO()),
        "torch.jit.load": lambda: torch.jit.load(io.BytesIO(saved.getvalue())),
        "torch.jit.freeze": lambda: torch.jit.freeze(scripted),
        "torch.jit.optimize_for_inference": lambda: torch.jit.optimize_for_inference(torch.jit.script(module)),
    }
    rows = []
    for name, call in calls.items():
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            call()
        announced = [w for w in caught if name in str(w.message) and issubclass(w.category, _ANNOUNCE)]
        message = messages.of_warning(announced[0]) if announced else ""
        row = {"call": name, "deprecated": "yes" if announced else "no", "message": message}
        rows.append(row | {"successor": SUCCESSORS[name], "torch": torch.__version__})
    return rows


class Gated(nn.Module):
    """A small network with a data-dependent branch by `torch.cond`, which torch.export can capture."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        h = torch.nn.functional.gelu(self.up(x))  # (B, 2·width)
        return self.down(torch.cond(x.sum() > 0, lambda h: h * 2, lambda h: -h, (h,)))


def round_trip(batches: tuple[int, ...] = (1, 3, 64), width: int = 8) -> list[dict[str, Any]]:
    """Export `Gated` with a dynamic batch size, save it, load it, and run it: TorchScript's use case by torch.export.

    A row for each batch and branch: whether the loaded program agrees with the module. No file is written.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(SEED)
        module = Gated(width).eval()
    exported = capture.exported(module, (torch.randn(4, width),), dynamic=({0: torch.export.Dim.DYNAMIC},))
    saved = io.BytesIO()
    torch.export.save(exported, saved)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*buffer is not writable")  # torch's own reading of the bytes
        loaded = torch.export.load(io.BytesIO(saved.getvalue())).module()
    rows = []
    for batch in batches:
        for branch, sign in (("h * 2", 1), ("-h", -1)):
            x = sign * torch.rand(batch, width)
            with torch.no_grad():
                rows.append({"batch": batch, "branch": branch, "agrees": same(loaded(x), module(x))})
    return rows
