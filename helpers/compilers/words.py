"""What torch says of code, in one line that is the same on every run and machine: no addresses, no paths, no ids."""

import linecache
import re
import traceback
import warnings
from collections.abc import Iterable

LONGEST = 200
_NOISE = (
    (re.compile(r"\x1b\[[0-9;]*m"), ""),  # colours
    (re.compile(r" at 0x[0-9a-fA-F]+|0x[0-9a-fA-F]{6,}"), ""),
    (re.compile(r"(?:/[\w.+-]+)+/([\w.+-]+)"), r"\1"),  # a path's last part
    (re.compile(r"(\w+\.py):\d+(?::\d+)?"), r"\1"),
    (re.compile(r"\bgraph_\d+_"), ""),  # how many graphs the process had compiled before
)
_FRAME = re.compile(r'File "([^"]+)", line (\d+)')
_HERE = re.compile(r"^(.*)\n[ ]*~+[ ~]*<--- HERE", re.MULTILINE)


def clean(text: str) -> str:
    """Text of any length without what differs from run to run."""
    for pattern, stays in _NOISE:
        text = pattern.sub(stays, text)
    return text


def first_line(text: str) -> str:
    """The first line that says something, cleaned, without a trailing remark on where it is."""
    lines = (line.strip() for line in clean(text).splitlines())
    said = next((line for line in lines if line), "")
    said = re.sub(r"\s{2,}#.*$", "", said)
    return said if len(said) <= LONGEST else said[: LONGEST - 1] + "…"


def of_error(error: BaseException) -> str:
    return f"{type(error).__name__}: {first_line(str(error))}".rstrip(": ")


def of_warning(warning: warnings.WarningMessage) -> str:
    return f"{warning.category.__name__}: {first_line(str(warning.message))}"


def line_of_error(error: BaseException, files: Iterable[str]) -> str:
    """The innermost line of code, in one of the files, that an error is about; empty where none is told.

    TorchScript quotes the line over a mark; Dynamo and torch.export write a stack into their text; others leave
    Python's traceback.
    """
    files, said = set(files), str(error)
    if marked := _HERE.search(said):
        return marked.group(1).strip()
    told = [(file, int(number)) for file, number in _FRAME.findall(said) if file in files]
    frames = [(f.filename, f.lineno or 0) for f in traceback.extract_tb(error.__traceback__) if f.filename in files]
    found = told or frames
    return linecache.getline(*found[-1]).strip() if found else ""
