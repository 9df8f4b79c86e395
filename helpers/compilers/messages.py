"""Error messages of torch and the runtimes, shortened to one line that is the same on every run and machine.

Each has its own format, mostly of many lines: `torch.export` quotes the line of Python that needed a value, the ONNX
exporter names the `OpOverload` that it can't translate, Inductor the `target` that it can't lower, TorchScript points
with an arrow, and ONNX runtimes name the missing operator.
"""

import contextlib
import linecache
import re
import traceback
import warnings
from collections.abc import Iterable, Iterator

import torch

from helpers.lab.experiment import is_out_of_memory

LONGEST = 200
_COLOURS = re.compile(r"\x1b\[[0-9;]*m|\[\d+m")
_NOISE = (
    (_COLOURS, ""),
    (re.compile(r" at 0x[0-9a-fA-F]+|0x[0-9a-fA-F]{6,}"), ""),
    (re.compile(r"(?:/[\w.+-]+)+/([\w.+-]+)"), r"\1"),  # a path's last part
    (re.compile(r"(\w+\.py):\d+(?::\d+)?"), r"\1"),
    (re.compile(r"\bgraph_\d+_"), ""),  # process-wide number of the graph
)
# Patterns that name an operation in a message, the most specific first.
_OPERATION = (
    re.compile(r"OpOverload\(op='([\w.:]+)', overload='(\w+)'\)"),  # the ONNX exporter
    re.compile(r"target: (\w+\.\w+\.\w+)"),  # Inductor's lowering
    re.compile(r"CustomOpDef\(([\w:]+)\)"),  # an operation without a fake implementation
    re.compile(r"torch\.ops\.(\w+\.\w+(?:\.\w+)?)"),
    re.compile(r"([\w.:]+)\(-?\d+\) is not a registered function"),  # ONNX Runtime
    re.compile(r"[Cc]ould not find an implementation for (\w+)\("),
    re.compile(r"\b([a-z]\w*::\w+)\b(?!::|\()"),  # TorchScript, OpenVINO
)
_FRAME = re.compile(r'File "([^"]+)", line (\d+)[^\n]*(?:\n\s*(?!File ")(\S[^\n]*))?')
_ARROW = re.compile(r'File "([^"]+)", line (\d+)\n((?:[^\n]*\n)*?)[^\n]*~+[ ~]*<--- HERE')  # TorchScript's


class ExportFailed(Exception):
    """A backend failed on a model; one line that names the operation or the line of code."""


@contextlib.contextmanager
def failures_named(step: str) -> Iterator[None]:
    """A context that turns errors into `ExportFailed`: `export failed at mylib::odd: No ONNX function found for …`.

    Out-of-memory errors are not converted.
    """
    try:
        yield
    except ExportFailed:
        raise
    except Exception as error:
        if is_out_of_memory(error):
            raise
        raise ExportFailed(failure_line(step, error)) from error


def failure_line(step: str, error: Exception) -> str:
    """The step, the operation or line of code, and the first line of the innermost cause (outer ones are generic)."""
    messages = [_COLOURS.sub("", str(each)).strip() for each in _causes(error)]
    names = (name for find in (_operation, _user_line) for name in map(find, messages) if name)
    where = next(names, None)
    reason = next((text.splitlines()[0].strip() for text in reversed(messages) if text), type(error).__name__)
    return _shortened(f"{step} failed at {where}: {reason}" if where else f"{step} failed: {reason}")


def clean(text: str) -> str:
    """Text without what differs from run to run: addresses, folders, line numbers, counters."""
    for pattern, replacement in _NOISE:
        text = pattern.sub(replacement, text)
    return text


def first_line(text: str) -> str:
    """The first line that isn't empty, cleaned, without a trailing comment on its location."""
    lines = (line.strip() for line in clean(text).splitlines())
    return _shortened(re.sub(r"\s{2,}#.*$", "", next(filter(None, lines), "")))


def of_error(error: BaseException) -> str:
    return f"{type(error).__name__}: {first_line(str(error))}".rstrip(": ")


def of_warning(warning: warnings.WarningMessage) -> str:
    return f"{warning.category.__name__}: {first_line(str(warning.message))}"


def source_line(error: BaseException, files: Iterable[str]) -> str:
    """The innermost line of code in one of the files that an error refers to; "" if there is none.

    TorchScript quotes the line above an arrow; Dynamo and torch.export include a stack in their message; for others it
    is in Python's traceback.
    """
    files, message = set(files), str(error)
    if arrow := _ARROW.search(message):
        return _last_line(arrow[3])
    frames = [(file, int(number)) for file, number, _ in _FRAME.findall(message)]
    frames = [frame for frame in frames if frame[0] in files] or [
        (frame.filename, frame.lineno or 0)
        for frame in traceback.extract_tb(error.__traceback__)
        if frame.filename in files
    ]
    return linecache.getline(*frames[-1]).strip() if frames else ""


def _causes(error: BaseException) -> Iterator[BaseException]:
    """An error and the chain of its causes."""
    seen: set[int] = set()
    current: BaseException | None = error
    while current is not None and id(current) not in seen:
        seen.add(id(current))
        yield current
        current = current.__cause__ or (None if current.__suppress_context__ else current.__context__)


def _operation(message: str) -> str | None:
    """The operation that a message is about, as `namespace::name` or `namespace::name.overload`."""
    for pattern in _OPERATION:
        if match := pattern.search(message):
            name = ".".join(match.groups())
            name = name if ":" in name else name.replace(".", "::", 1)
            return name.removesuffix(".default")
    return None


def _user_line(message: str) -> str | None:
    """The user's line of code that a message quotes: `if x.sum() > 0: (model.py:12)`."""
    if arrow := _ARROW.search(message):
        file, number, code = arrow[1], arrow[2], _last_line(arrow[3])
    else:
        outside = [frame for frame in _FRAME.findall(message) if frame[2] and torch.__path__[0] not in frame[0]]
        file, number, code = outside[-1] if outside else ("", "", "")
    return f"`{code.strip()}` ({file.rpartition('/')[2]}:{number})" if code else None


def _last_line(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1] if lines else ""


def _shortened(line: str) -> str:
    return line if len(line) <= LONGEST else line[: LONGEST - 1] + "…"
