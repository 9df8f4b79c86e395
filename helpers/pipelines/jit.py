"""Python's speed: loops by an interpreter and by what compiles them, and the size from which compiling pays.

The lecture compares `time python3 add_random.py 5` with `time pypy3 …`, once each. That is the start of a process, an
import, the compiler at work and a loop, all in one number. Here each has its own: `measure_jit` times the loop alone,
repeated, after a check that all ways return the same, with the first call apart; `process_start` what was around it.

The lecture's own loop grows a text by one piece a turn. CPython does that in place when nobody else holds the text,
which is no promise of the language; numba and PyPy copy it, O(n²) over the loop. So the lecture's PyPy loses, 0.897 s
to 0.044 s, for its compiler's sake least of all: without the text (`integers`) it wins.
"""

import json
import math
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np

from helpers.lab.arguments import check_at_least, check_positive
from helpers.lab.timing import NO_DIFFERENCE, Disagreement, Timing

from . import jit_programs
from .jit_programs import LOOPS
from .jit_ways import INTERPRETER, NUMPY, PYPY, WAYS, draw, native, obstacle, plain, prepared

REPEAT = 20
MOST = 1000  # calls of a way, however short
SECONDS = 0.2  # a way's calls take so long at least, or `MOST` of them do

SCRIPT = Path(jit_programs.__file__)


def measure_jit(
    program: str, size: int, ways: Sequence[str] | None = None, *, seconds: float = SECONDS, seed: int = 0
) -> list[dict[str, Any]]:
    """A row a way about a loop of `size` turns: the times of a call, and what the first call took beyond that.

    The ways take turns in this process, each on its own kind of container, but for PyPy, which has a process of its
    own. `compile_s` is what compiling took (for code kept on disk: reading it), 0 for what compiles nothing; a JIT that
    compiles a piece at a time, as PyPy does, is faster after the first call too, and `compile_s` is less than all of
    it. Every result must be the interpreter's, or it is a `Disagreement`. A way is called 21 times or more: `strings`
    of 100,000 turns take PyPy 20 s, and of more turns the square of that.
    """
    if program not in LOOPS:
        raise ValueError(f"unknown program {program!r}; valid: {', '.join(LOOPS)}")
    check_positive(size=size)
    check_at_least(0, seed=seed)
    ways = list(WAYS) if ways is None else list(ways)
    obstacles = {way: obstacle(way) for way in ways}
    given = draw(program, size, seed)
    expected = plain(LOOPS[program](given.tolist()))
    taken = _in_turn(program, given, [way for way in ways if not obstacles[way] and way != PYPY], expected, seconds)
    if PYPY in ways and not obstacles[PYPY]:
        taken[PYPY] = _in_pypy(program, given, expected, seconds)
    rows = []
    for way in ways:
        row = {"program": program, "way": way, "size": size}
        if obstacles[way]:
            rows.append(row | {"status": obstacles[way]})
            continue
        timing = Timing.of(taken[way][1:])
        compiled = way not in (INTERPRETER, NUMPY)
        compile_s = max(taken[way][0] - timing.median_ms, 0.0) / 1e3 if compiled else 0.0
        rows.append(row | {"status": "ok", "compile_s": compile_s} | timing.row())
    return rows


def break_even(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """How much work it takes until compiling has paid, a row for each row of `measure_jit` that compiles.

    `calls` of that size, or `turns` of the loop, after which the time that was saved is what compiling took:
    compile_s / (interpreter's time - compiled time). Infinite where nothing is saved, or less than can be told. Where
    a way's cost a turn grows with the size, so does this: read it along the sizes.
    """
    interpreted = {(row["program"], row["size"]): row for row in rows if row["way"] == INTERPRETER}
    found = []
    for row in rows:
        if row.get("status", "ok") != "ok" or row["compile_s"] == 0:
            continue
        base = interpreted.get((row["program"], row["size"]))
        if base is None:
            raise ValueError(f"no row of {INTERPRETER} for {row['program']!r} at size {row['size']} to compare with")
        gain = base["median_ms"] - row["median_ms"]
        pays = gain > NO_DIFFERENCE * base["median_ms"]
        calls = row["compile_s"] * 1e3 / gain if pays else math.inf
        found.append(
            {"program": row["program"], "way": row["way"], "size": row["size"], "compile_s": row["compile_s"]}
            | {"speedup": base["median_ms"] / row["median_ms"], "gain_ns_per_turn": gain * 1e6 / row["size"]}
            | {"calls": calls, "turns": calls * row["size"]}
        )
    return found


def process_start(exponent: int = 5, *, repeat: int = REPEAT) -> list[dict[str, Any]]:
    """What the lecture's one number holds, a row for each interpreter and part of it; milliseconds of whole processes.

    `start` runs nothing, `start, import random` that import, `demo` the lecture's program with 10^exponent turns, and
    `demo, its loop` what of that the program itself sees. The processes take turns.
    """
    check_at_least(0, exponent=exponent)
    check_positive(repeat=repeat)
    interpreters = {INTERPRETER: sys.executable, PYPY: shutil.which("pypy3")}
    commands = {
        (name, part): [path, *arguments]
        for name, path in interpreters.items()
        if path
        for part, arguments in {
            "start": ["-c", "pass"],
            "start, import random": ["-c", "import random"],
            "demo": [str(SCRIPT), "demo", str(exponent)],
        }.items()
    }
    taken: dict[tuple[str, str], list[float]] = {}
    for _ in range(repeat):
        for (name, part), command in commands.items():
            began = time.perf_counter()
            said = _output(command)
            taken.setdefault((name, part), []).append((time.perf_counter() - began) * 1e3)
            if part == "demo":
                taken.setdefault((name, "demo, its loop"), []).append(float(said) * 1e3)
    rows = [{"way": name, "part": part} | Timing.of(ms).row() for (name, part), ms in taken.items()]
    return rows + [{"way": name, "status": obstacle(name)} for name, path in interpreters.items() if not path]


def _in_turn(program: str, given: np.ndarray, ways: list[str], expected: Any, seconds: float) -> dict[str, list[float]]:
    """Milliseconds of each way's calls, the first in front; in this process, A B A B."""
    with ExitStack() as stack:
        calls: dict[str, Callable[[], Any]] = {}
        taken: dict[str, list[float]] = {}
        for way in ways:
            loop, container = stack.enter_context(prepared(way, program, given)), native(way, given)
            calls[way] = lambda loop=loop, container=container: loop(container)
            result, ms = _timed(calls[way])
            _check(way, program, result, expected)
            taken[way] = [ms]
        for done in range(MOST):
            for way, call in calls.items():
                enough = done >= REPEAT and sum(taken[way][1:]) >= seconds * 1e3
                if not enough:
                    taken[way].append(_timed(call)[1])
    return taken


def _in_pypy(program: str, given: np.ndarray, expected: Any, seconds: float) -> list[float]:
    command = [shutil.which("pypy3"), str(SCRIPT), "run", program, str(seconds)]
    found = json.loads(_output(command, json.dumps(native(PYPY, given))))
    _check(PYPY, program, found["result"], expected)
    return found["ms"]


def _check(way: str, program: str, result: Any, expected: Any) -> None:
    if plain(result) != expected:
        raise Disagreement(f"{way!r} returns another result than {INTERPRETER} for {program!r}")


def _timed(call: Callable[[], Any]) -> tuple[Any, float]:
    """What a call returns, and its milliseconds on the host's clock: no device takes part."""
    began = time.perf_counter()
    result = call()
    return result, (time.perf_counter() - began) * 1e3


def _output(command: Sequence[str], given: str = "") -> str:
    return subprocess.run(command, input=given, capture_output=True, text=True, check=True).stdout
