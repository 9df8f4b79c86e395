"""Speed of Python loops by an interpreter and by compilers, and the size from which compiling pays.

The lecture compares `time python3 add_random.py 5` with `time pypy3 …`, once each: one number for process start,
import, compilation and loop. Here they are separate: `measure_jit` times the loop alone, repeatedly, after checking
that all variants return the same, and the first call separately; `process_start` times the rest.

The lecture's loop appends to a string. CPython does that in place if there is no other reference to the string, an
optimisation that the language doesn't guarantee; numba and PyPy copy it, O(n²) over the loop. This is why the lecture's
PyPy loses, 0.897 s to 0.044 s: without the string (`integers`) it wins.

numba compiles a function for its argument types at the first call: 0.1 to 1 s here, once a process, or only once if it
may cache the machine code on disk. numpy needs a vectorised algorithm. `torch.compile` isn't measured: it unrolls a
loop over numbers into a graph with a node for each turn, compiled again for each length.
"""

import contextlib
import functools
import json
import math
import shutil
import subprocess
import sys
import tempfile
import time
import types
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from helpers.lab.arguments import check_at_least, check_choice, check_positive
from helpers.lab.machine import missing_because
from helpers.lab.timing import NO_DIFFERENCE, Disagreement, Timing

from . import jit_loops
from .jit_loops import LOOPS, add

INTERPRETER, NUMBA, CACHED, NUMPY, PYPY = "CPython", "numba", "numba, kept on disk", "numpy", "PyPy"
VARIANTS: dict[str, tuple[str, ...]] = {  # variant -> requirements
    INTERPRETER: (),
    NUMBA: ("numba",),
    CACHED: ("numba",),
    NUMPY: (),
    PYPY: ("pypy3",),
}

REPEAT = 20
MOST = 1000  # most calls of a variant
SECONDS = 0.2  # least time of a variant's calls, unless there are `MOST`
EPOCHS = 20  # of a history for `forgetting`

SCRIPT = Path(jit_loops.__file__)


def measure_jit(
    program: str, size: int, variants: Sequence[str] = tuple(VARIANTS), *, seconds: float = SECONDS
) -> list[dict[str, Any]]:
    """A row a variant for a loop of `size` turns: times of a call, and the excess time of the first call.

    The variants are timed in turn in this process, with lists for the interpreter and arrays for the others; PyPy has
    its own process. `compile_s` is the time of compiling (with a disk cache: of loading), 0 for CPython and numpy; PyPy
    goes on compiling after the first call, so its `compile_s` is an underestimate. If the interpreter is among the
    variants, `speedup` is against it, and `turns` the number of loop turns after which compiling pays, if it does.
    Another result than the interpreter's raises a `Disagreement`. A variant is called at least 21 times: `strings` with
    100,000 turns takes PyPy 20 s, growing quadratically.
    """
    check_choice(LOOPS, program=program)
    for variant in variants:
        check_choice(VARIANTS, variant=variant)
    check_positive(size=size)
    reasons = {variant: missing_because(*VARIANTS[variant]) for variant in variants}
    numbers = draw(program, size)
    expected = plain(LOOPS[program](numbers.tolist()))
    call_ms = _in_turn(program, numbers, [v for v in variants if not reasons[v] and v != PYPY], expected, seconds)
    if PYPY in variants and not reasons[PYPY]:
        call_ms[PYPY] = _in_pypy(program, numbers, expected, seconds)
    timings = {variant: Timing.of(ms[1:]) for variant, ms in call_ms.items()}
    interpreted = timings.get(INTERPRETER)
    rows = []
    for variant in variants:
        row = {"program": program, "variant": variant, "size": size, "status": reasons[variant] or "ok"}
        if not reasons[variant]:
            timing, compiles = timings[variant], variant not in (INTERPRETER, NUMPY)
            compile_s = max(call_ms[variant][0] - timing.median_ms, 0.0) / 1e3 if compiles else 0.0
            row |= {"compile_s": compile_s} | timing.row()
            if interpreted and compile_s:
                row["speedup"] = interpreted.median_ms / timing.median_ms
                turns = break_even_turns(interpreted.median_ms, timing.median_ms, compile_s, size)
                row |= {"turns": turns} if turns < math.inf else {}
        rows.append(row)
    return rows


def break_even_turns(interpreted_ms: float, compiled_ms: float, compile_s: float, size: int) -> float:
    """Turns of the loop after which the time saved equals the compile time.

    Infinite if nothing is saved, or less than the noise. It depends on the size if a variant's cost a turn does.
    """
    gain_ms = interpreted_ms - compiled_ms  # a call of `size` turns
    return size * compile_s * 1e3 / gain_ms if gain_ms > NO_DIFFERENCE * interpreted_ms else math.inf


def process_start(exponent: int = 5, *, repeat: int = REPEAT) -> list[dict[str, Any]]:
    """The parts of the lecture's single timing, a row for each interpreter and part; milliseconds of a full process.

    `start` runs nothing, `start, import random` that import, `demo` the lecture's program with 10^exponent turns, and
    `demo, its loop` is the time of the loop as measured by the program. The processes are timed in turn.
    """
    check_at_least(0, exponent=exponent)
    check_positive(repeat=repeat)
    interpreters = {INTERPRETER: sys.executable}
    pypy_missing = missing_because(*VARIANTS[PYPY])
    if not pypy_missing:
        interpreters[PYPY] = shutil.which("pypy3")
    parts = {
        "start": ["-c", "pass"],
        "start, import random": ["-c", "import random"],
        "demo": [str(SCRIPT), "demo", str(exponent)],
    }
    taken: dict[tuple[str, str], list[float]] = {}
    for _ in range(repeat):
        for name, path in interpreters.items():
            for part, arguments in parts.items():
                printed, ms = _timed(lambda command=(path, *arguments): _output(command))
                taken.setdefault((name, part), []).append(ms)
                if part == "demo":
                    taken.setdefault((name, "demo, its loop"), []).append(float(printed) * 1e3)
    rows = [{"variant": name, "part": part} | Timing.of(ms).row() for (name, part), ms in taken.items()]
    return rows + ([{"variant": PYPY, "status": pypy_missing}] if pypy_missing else [])


def draw(program: str, size: int, seed: int = 0) -> np.ndarray:
    """Random input of a program, for about `size` turns of its innermost loop."""
    rng = np.random.default_rng([seed, size])
    if program == "forgetting":
        return rng.random((EPOCHS, max(size // (EPOCHS - 1), 1))) < 0.7  # (epochs, samples)
    if program == "packing":
        return rng.integers(1, 1025, size)  # (documents,)
    return rng.random(size)


@contextlib.contextmanager
def prepared(variant: str, program: str, numbers: np.ndarray) -> Iterator[Callable[[Any], Any]]:
    """A context with a variant's function, which is compiled at its first call."""
    if variant == INTERPRETER:
        yield LOOPS[program]
    elif variant == NUMPY:
        yield VECTORISED[program]
    elif variant == NUMBA:
        yield _jitted(program)
    else:
        with _cache_folder():
            _jitted(program, cache=True)(numbers)  # fills the cache for the next one
            yield _jitted(program, cache=True)


def plain(result: Any) -> Any:
    """A result converted to Python's types, for comparison."""
    if isinstance(result, (tuple, list)):
        return [plain(part) for part in result]
    return result.item() if isinstance(result, np.generic) else result


def _in_turn(
    program: str, numbers: np.ndarray, variants: list[str], expected: Any, seconds: float
) -> dict[str, list[float]]:
    """Milliseconds of each variant's calls, including the first; in this process, in turn (A B A B)."""
    with contextlib.ExitStack() as stack:
        calls: dict[str, Callable[[], Any]] = {}
        taken: dict[str, list[float]] = {}
        for variant in variants:
            loop = stack.enter_context(prepared(variant, program, numbers))
            container = numbers.tolist() if variant == INTERPRETER else numbers
            calls[variant] = functools.partial(loop, container)
            result, ms = _timed(calls[variant])
            _check(variant, program, result, expected)
            taken[variant] = [ms]
        for done in range(MOST):
            for variant, call in calls.items():
                if done < REPEAT or sum(taken[variant][1:]) < seconds * 1e3:
                    taken[variant].append(_timed(call)[1])
    return taken


def _in_pypy(program: str, numbers: np.ndarray, expected: Any, seconds: float) -> list[float]:
    command = [shutil.which("pypy3"), str(SCRIPT), "run", program, str(seconds)]
    child = json.loads(_output(command, json.dumps(numbers.tolist())))
    _check(PYPY, program, child["result"], expected)
    return child["ms"]


def _check(variant: str, program: str, result: Any, expected: Any) -> None:
    if plain(result) != expected:
        raise Disagreement(f"{variant!r} returns another result than {INTERPRETER} for {program!r}")


def _timed(call: Callable[[], Any]) -> tuple[Any, float]:
    """A call's result and its milliseconds."""
    began = time.perf_counter()
    result = call()
    return result, (time.perf_counter() - began) * 1e3


def _output(command: Sequence[str], stdin: str = "") -> str:
    return subprocess.run(command, input=stdin, capture_output=True, text=True, check=True).stdout


def _strings(numbers: np.ndarray) -> tuple[int, str]:
    large = int(np.count_nonzero(numbers > 0.5))
    return 2 * (len(numbers) - large), "ab" * large


def _integers(numbers: np.ndarray) -> tuple[int, int]:
    large = int(np.count_nonzero(numbers > 0.5))
    return 2 * (len(numbers) - large), 3 * large


def _forgetting(right: np.ndarray) -> int:
    return int(np.count_nonzero(right[:-1] & ~right[1:]))


def _packing(lengths: np.ndarray) -> tuple[int, int]:
    """One binary search a window instead of one turn a document; windows are still filled one after another."""
    ends = np.cumsum(lengths)
    windows, start, filled = 0, 0, 0
    while start < len(lengths):
        start = int(np.searchsorted(ends, filled + 2048, side="right"))
        filled, windows = int(ends[start - 1]), windows + 1
    return windows, windows * 2048 - filled


VECTORISED: dict[str, Callable[[np.ndarray], Any]] = {
    "strings": _strings,
    "integers": _integers,
    "forgetting": _forgetting,
    "packing": _packing,
}


def _jitted(program: str, cache: bool = False) -> Callable[[Any], Any]:
    import numba

    _start_numba()
    # The loop must call a compiled `add`. It is a global and not in a closure, as numba's disk cache is keyed by the
    # contents of closures, which are new objects in every process.
    loop = LOOPS[program]
    return numba.njit(cache=cache)(types.FunctionType(loop.__code__, {"add": numba.njit(add)}, loop.__name__))


@functools.cache
def _start_numba() -> None:
    """Compile a trivial function: the first compilation of a process also initialises the compiler."""
    import numba

    numba.njit(lambda numbers: numbers.sum())(np.zeros(2))


@contextlib.contextmanager
def _cache_folder() -> Iterator[None]:
    """A context in which numba's disk cache is a temporary folder."""
    import numba

    before = numba.config.CACHE_DIR
    with tempfile.TemporaryDirectory() as folder:
        numba.config.CACHE_DIR = folder
        try:
            yield
        finally:
            numba.config.CACHE_DIR = before
