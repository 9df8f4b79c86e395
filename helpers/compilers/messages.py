"""Error messages of torch and the runtimes, shortened to one line that is the same on every run and machine.

Each has its own format, mostly of many lines; the innermost cause says what is wrong.
"""

import contextlib
import re
from collections.abc import Iterator

from ..lab.memory import is_out_of_memory

LONGEST = 200
_COLOURS = re.compile(r"\x1b\[[0-9;]*m|\[\d+m")
_NOISE = (
    (_COLOURS, ""),
    (re.compile(r" at 0x[0-9a-fA-F]+|0x[0-9a-fA-F]{6,}"), ""),
    (re.compile(r"(?:/[\w.+-]+)+/([\w.+-]+)"), r"\1"),  # a path's last part
    (re.compile(r"(\w+\.py):\d+(?::\d+)?"), r"\1"),
    (re.compile(r"\bgraph_\d+_"), ""),  # process-wide number of the graph
)


class ExportFailed(Exception):
    """A backend failed on a model; one line."""


@contextlib.contextmanager
def failures_named(step: str) -> Iterator[None]:
    """A context that turns errors into `ExportFailed`: `export failed: No ONNX function found for …`.

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
    """The step, and the first line of the innermost cause (outer ones are generic)."""
    messages = [_COLOURS.sub("", str(each)).strip() for each in _causes(error)]
    reason = next((text.splitlines()[0].strip() for text in reversed(messages) if text), type(error).__name__)
    line = f"{step} failed: {reason}"
    return line if len(line) <= LONGEST else line[: LONGEST - 1] + "…"


def clean(text: str) -> str:
    """Text without what differs from run to run: addresses, folders, line numbers, counters."""
    for pattern, replacement in _NOISE:
        text = pattern.sub(replacement, text)
    return text


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    """An error and the chain of its causes."""
    while error is not None:
        yield error
        error = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
