"""What an export or a compiler said when it gave up: which operation, in one line.

Each of them reports in its own words, and most of them in many lines: `torch.export` quotes the line of Python that
asked for a value, the ONNX exporter names the `OpOverload` that it has no function for, Inductor the `target` that it
could not lower, TorchScript points with an arrow, and a runtime that reads ONNX names the operator that it lacks.
"""

import contextlib
import re
from collections.abc import Iterator

import torch

from helpers.lab.experiment import is_out_of_memory

# How an operation is named in a message, the most telling first.
_NAMED = (
    re.compile(r"OpOverload\(op='([\w.:]+)', overload='(\w+)'\)"),  # the ONNX exporter
    re.compile(r"target: (\w+\.\w+\.\w+)"),  # Inductor's lowering
    re.compile(r"CustomOpDef\(([\w:]+)\)"),  # an operation without a fake implementation
    re.compile(r"torch\.ops\.(\w+\.\w+(?:\.\w+)?)"),
    re.compile(r"([\w.:]+)\(-?\d+\) is not a registered function"),  # ONNX Runtime
    re.compile(r"[Cc]ould not find an implementation for (\w+)\("),
    re.compile(r"\b([a-z]\w*::\w+)\b(?!::|\()"),  # TorchScript, OpenVINO
)
_LINE = re.compile(r'File "([^"]+)", line (\d+)[^\n]*\n\s*(\S[^\n]*)')
_ARROW = re.compile(r'File "([^"]+)", line (\d+)\n((?:[^\n]*\n)*?)[^\n]*~+ <--- HERE')
_COLOURS = re.compile(r"\x1b?\[\d+m")
_LONGEST = 200


class ExportFailed(Exception):
    """A model that a backend could not take; one line that names the operation, or the line of code, that stops it."""


@contextlib.contextmanager
def failures_named(step: str) -> Iterator[None]:
    """What fails inside is an `ExportFailed`: `export failed at mylib::odd: No ONNX function found for …`.

    Memory that has run out stays what it is.
    """
    try:
        yield
    except ExportFailed:
        raise
    except Exception as error:
        if is_out_of_memory(error):
            raise
        raise ExportFailed(in_a_line(step, error)) from error


def in_a_line(step: str, error: Exception) -> str:
    """The step, where it stopped, and the first line of the innermost cause: what wraps it says how to report a bug."""
    messages = [_COLOURS.sub("", str(each)).strip() for each in chain(error)]
    where = next((found for find in (_operation, _line) for found in map(find, messages) if found), None)
    said = next((message.splitlines()[0].strip() for message in reversed(messages) if message), type(error).__name__)
    line = f"{step} failed at {where}: {said}" if where else f"{step} failed: {said}"
    return line if len(line) <= _LONGEST else line[: _LONGEST - 1] + "…"


def chain(error: BaseException) -> Iterator[BaseException]:
    """An error, what it was raised from, what that was raised from, and so on."""
    seen: set[int] = set()
    current: BaseException | None = error
    while current is not None and id(current) not in seen:
        seen.add(id(current))
        yield current
        current = current.__cause__ or (None if current.__suppress_context__ else current.__context__)


def _operation(message: str) -> str | None:
    """The operation that a message is about, as `namespace::name` or `namespace::name.overload`."""
    for pattern in _NAMED:
        if match := pattern.search(message):
            name = ".".join(match.groups())
            name = name if ":" in name else name.replace(".", "::", 1)
            return name.removesuffix(".default")
    return None


def _line(message: str) -> str | None:
    """The user's line of code that a message quotes: `if x.sum() > 0: (model.py:12)`."""
    if match := _ARROW.search(message):
        lines = [line.strip() for line in match[3].splitlines() if line.strip()]
        return f"`{lines[-1]}` ({_short(match[1], match[2])})" if lines else None
    outside = [match for match in _LINE.finditer(message) if torch.__path__[0] not in match[1]]
    return f"`{outside[-1][3].strip()}` ({_short(outside[-1][1], outside[-1][2])})" if outside else None


def _short(path: str, line: str) -> str:
    return f"{path.rpartition('/')[2]}:{line}"
