"""Whether what was captured does what the function does; and what torch says of TorchScript's end, with its successor.

    measure_semantics("branch on data", "torch.jit.trace")
    {"case": "branch on data", "variant": "torch.jit.trace", "outcome": "wrong, with a warning", …}

A case is captured with its example, then called with it, then with arguments (or in a mode, or with a setting) that
take the function along another path. What is compared is all that a caller can see of a call: what it returns or that
it raises, what it prints, what it appends to a list, what its arguments are afterwards. Each call is made after the
same seed, and compared with the same call of the plain function.
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

CPU = torch.device("cpu")  # where all cases' tensors lie
SEED = 20
_FILES = (capture_cases.__file__,)  # whose lines of code a row may quote

# What replaces each call, by torch's documentation. `freeze` and its kind optimise a graph, which a compiler does.
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
    """What a caller sees of a call."""

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
    """The variants that a case can be captured by: only some cases have a repaired version."""
    return list(capture.VARIANTS) + [capture.REPAIRED] * (_make(case).repaired is not None)


def measure_semantics(case: str, variant: str) -> dict[str, Any]:
    """Capture a case by a variant, call it, and return one row about the result.

    `outcome` is one of `OUTCOMES`; `when` is where it refused, at capture or at a later call; `message` is what torch
    said in a line, and `line` the line of code that it names; `graphs`, `breaks` and `recompiles` count: breaks in the
    example's call, recompilations because of a guard that failed later. Costs some milliseconds (a second where
    torch.export is strict; some seconds where inductor compiles). Where a machine lacks what inductor compiles with,
    the row has a `status` in place of an outcome.
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
        # That a whole variant is deprecated says nothing about the case.
        heard = [warning for warning in caught if "deprecated" not in str(warning.message)]
        row |= {"graphs": 1} | (_dynamo_counts(name, variant) if by_dynamo else {})
    row["warnings"] = len(heard)
    refused = next((c.raised for c, e in zip(calls, expected, strict=True) if c.raised and not e.raised), None)
    if refused is not None:
        at_capture = by_dynamo and calls[0].raised is refused
        row |= {"outcome": REFUSES, "when": "capture" if at_capture else "call"} | _about_error(refused)
        return row | ({"graphs": 0} if at_capture else {})
    if not all(map(Observed.same, calls, expected)):
        if not heard:
            return row | {"outcome": SILENT, "message": "", "line": ""}
        return row | {"outcome": WARNED} | _about_warning(heard[0])
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


def _make(case: str) -> Case:
    check_choice(CASES, case=case)
    return CASES[case]()


def _capture(case: Case, variant: str) -> Callable[..., Any]:
    """What a variant makes of a case's function; what capturing left in the list is forgotten."""
    example = copy.deepcopy(case.example)
    if variant == capture.REPAIRED:
        captured = capture.exported(case.repaired, example, dynamic=case.dynamic).module()
    else:
        captured = capture.VARIANTS[variant](case.fn, example)
    case.log.clear()
    return captured


def _calls(case: Case, fn: Callable[..., Any]) -> list[Observed]:
    """A call with the example, what happens between, a call with the other arguments."""
    first = _call(case, fn, case.example)
    try:
        case.between(fn)
    except Exception as error:  # what was captured may not have another mode
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
    """How often Dynamo compiled again in the calls so far, and where it breaks the function in the example's call."""
    from torch._dynamo.utils import get_compilation_metrics

    reasons = [metrics.recompile_reason for metrics in get_compilation_metrics() if metrics.recompile_reason]
    row: dict[str, Any] = {"recompiles": len(reasons)}
    if reasons:
        row["message"] = messages.first_line(reasons[0].partition(": ")[2])
    if variant == capture.FULLGRAPH:  # which breaks nowhere, or refuses
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
    """What Dynamo says when it may not break the graph: more than the reason that it keeps of a break."""
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
    """Call each part of TorchScript, and return a row a call: what it warned of, if it did, and its successor.

    `deprecated` is whether a warning of the kind that announces a removal was caught in this call, now.
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
        about = [w for w in caught if name in str(w.message) and issubclass(w.category, _ANNOUNCE)]
        message = messages.of_warning(about[0]) if about else ""
        row = {"call": name, "deprecated": "yes" if about else "no", "message": message}
        rows.append(row | {"successor": SUCCESSORS[name], "torch": torch.__version__})
    return rows


class Gated(nn.Module):
    """A small network with a branch on its data, written so that torch.export captures all of it."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        h = torch.nn.functional.gelu(self.up(x))  # (B, 2·width)
        return self.down(torch.cond(x.sum() > 0, lambda h: h * 2, lambda h: -h, (h,)))


def round_trip(batches: tuple[int, ...] = (1, 3, 64), width: int = 8) -> list[dict[str, Any]]:
    """torch.export in TorchScript's place: exported with a batch of any size, saved, loaded, and run.

    A row for each batch and each branch: whether the program loaded from its bytes (in memory, no file is written)
    agrees with the module.
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
