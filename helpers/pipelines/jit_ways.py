"""The ways to run a loop of `jit_programs` fast, ready to be called: the interpreter, numba, numpy.

numba compiles a function for the types of its arguments when it is first called: 0.1 to 1 s for these, once a process,
or once for all if it may keep the machine code on disk. numpy needs the loop to be thought anew. `torch.compile` isn't
among them: it unrolls a loop over numbers into a graph of as many nodes, to be compiled for each length again.
"""

import contextlib
import functools
import shutil
import tempfile
import types
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from helpers.lab.machine import NOT_INSTALLED, installed

from .jit_programs import LOOPS, add

INTERPRETER, NUMBA, CACHED, NUMPY, PYPY = "CPython", "numba", "numba, kept on disk", "numpy", "PyPy"
WAYS = (INTERPRETER, NUMBA, CACHED, NUMPY, PYPY)

EPOCHS = 20  # of a history for `forgetting`

Array = np.ndarray


def obstacle(way: str) -> str:
    """Why a way can't run here, in a line for a table's status; "" if it can."""
    if way not in WAYS:
        raise ValueError(f"unknown way {way!r}; valid: {'; '.join(WAYS)}")
    if way in (NUMBA, CACHED) and installed("numba") is None:
        return NOT_INSTALLED + "numba"
    if way == PYPY and shutil.which("pypy3") is None:
        return NOT_INSTALLED + "pypy3"
    return ""


def draw(program: str, size: int, seed: int = 0) -> Array:
    """A program's input of about `size` turns of its innermost loop."""
    rng = np.random.default_rng([seed, size])
    if program == "forgetting":
        return rng.random((EPOCHS, max(size // (EPOCHS - 1), 1))) < 0.7  # (epochs, samples)
    if program == "packing":
        return rng.integers(1, 1025, size)  # (documents,)
    return rng.random(size)


def native(way: str, given: Array) -> Any:
    """The input as a way's own kind of container: lists for interpreters, arrays otherwise."""
    return given.tolist() if way in (INTERPRETER, PYPY) else given


@contextlib.contextmanager
def prepared(way: str, program: str, given: Array) -> Iterator[Callable[[Any], Any]]:
    """A way's function, not compiled yet: its first call is the dear one. PyPy has a process of its own instead."""
    if way == INTERPRETER:
        yield LOOPS[program]
    elif way == NUMPY:
        yield VECTORISED[program]
    elif way == NUMBA:
        yield _jitted(program)
    elif way == CACHED:
        with _cache_folder():
            _jitted(program, cache=True)(given)  # writes what the next one reads
            yield _jitted(program, cache=True)
    else:
        raise ValueError(f"{way!r} can't be called from here")


def plain(result: Any) -> Any:
    """A result in Python's own types, to be compared."""
    if isinstance(result, (tuple, list)):
        return [plain(part) for part in result]
    return result.item() if isinstance(result, np.generic) else result


def _strings(numbers: Array) -> tuple[int, str]:
    large = int(np.count_nonzero(numbers > 0.5))
    return 2 * (len(numbers) - large), "ab" * large


def _integers(numbers: Array) -> tuple[int, int]:
    large = int(np.count_nonzero(numbers > 0.5))
    return 2 * (len(numbers) - large), 3 * large


def _forgetting(right: Array) -> int:
    return int(np.count_nonzero(right[:-1] & ~right[1:]))


def _packing(lengths: Array) -> tuple[int, int]:
    """One search a window instead of one turn a document; in order it stays."""
    ends = np.cumsum(lengths)
    windows, start, filled = 0, 0, 0
    while start < len(lengths):
        start = int(np.searchsorted(ends, filled + 2048, side="right"))
        filled, windows = int(ends[start - 1]), windows + 1
    return windows, windows * 2048 - filled


VECTORISED: dict[str, Callable[[Array], Any]] = {
    "strings": _strings,
    "integers": _integers,
    "forgetting": _forgetting,
    "packing": _packing,
}


def _jitted(program: str, cache: bool = False) -> Callable[[Any], Any]:
    import numba

    _start_numba()
    # Compiled code calls compiled code, so `add` has to mean another thing. As a global, not in a closure: what is kept
    # on disk is found by what a closure holds, and that is new in every process.
    loop = LOOPS[program]
    return numba.njit(cache=cache)(types.FunctionType(loop.__code__, {"add": numba.njit(add)}, loop.__name__))


@functools.cache
def _start_numba() -> None:
    """The first compilation of a process sets up the compiler, which is no program's price."""
    import numba

    numba.njit(lambda numbers: numbers.sum())(np.zeros(2))


@contextlib.contextmanager
def _cache_folder() -> Iterator[None]:
    """numba keeps its machine code in a folder of ours meanwhile, which is removed."""
    import numba

    before = numba.config.CACHE_DIR
    with tempfile.TemporaryDirectory() as folder:
        numba.config.CACHE_DIR = folder
        try:
            yield
        finally:
            numba.config.CACHE_DIR = before
