"""Speed of Python loops by the interpreter, numba and numpy, and the number of turns after which compiling has paid.

The lecture compares `time python3 add_random.py 5` with `time pypy3 …`, once each: one number for process start,
import, compilation and loop. `jit` times the loop alone, after checking that all variants return the same, and the
first call, which compiles, separately.

The lecture's loop (`strings`) appends to a string. CPython does that in place if there is no other reference to the
string, an optimisation that the language doesn't guarantee; numba and PyPy copy it, O(n²) over the loop. This is why
the lecture's PyPy loses, 0.897 s to 0.044 s: without the string (`integers`) it wins.

numba compiles a function for its argument types at the first call, 0.1 to 1 s here. `torch.compile` isn't measured: it
unrolls a loop over numbers into a graph with a node for each turn, compiled again for each length.
"""

import functools
import time
import types
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pandas as pd

from ...book.table import Worth, table
from ...lab import STATUS, Row, missing_because
from ...lab.timing import NO_DIFFERENCE, Disagreement, compare

INTERPRETER, NUMBA, NUMPY = "CPython", "numba", "numpy"


def add(x, y):
    return x + y


def strings(numbers):
    count = 0
    text = ""
    for number in numbers:
        if number > 0.5:
            text += add("a", "b")
        else:
            count += add(1, 1)
    return count, text


def integers(numbers):
    large = 0
    small = 0
    for number in numbers:
        if number > 0.5:
            large += add(2, 1)
        else:
            small += add(1, 1)
    return small, large


def _counted(of_large: Callable[[int], Any], numbers: np.ndarray) -> tuple[int, Any]:
    large = int(np.count_nonzero(numbers > 0.5))
    return 2 * (len(numbers) - large), of_large(large)


LOOPS = {"strings": strings, "integers": integers}
# Compilers copy the text of `strings` at each turn: 10⁵ turns take numba a second.
SIZES = {"strings": (10**2, 10**3, 10**4), "integers": (10**2, 10**4, 10**6)}
VECTORISED: dict[str, Callable[[np.ndarray], Any]] = {
    "strings": functools.partial(_counted, lambda large: "ab" * large),
    "integers": functools.partial(_counted, lambda large: 3 * large),
}


@table(
    small=[{"program": "integers", "size": 1000}],
    cpu=[{"program": program, "size": size} for program, sizes in SIZES.items() for size in sizes],
    gpu=[],
    version=2,
    columns="variant median_ms p20_ms p80_ms n compile_s? speedup? turns?",
    worth=Worth(2, "Python compiled", cpu=1.8),
)
def jit(program: str, size: int) -> list[Row]:
    """A row a variant for a loop of `size` turns: times of a call, in turn in this process.

    The interpreter gets lists, the others arrays. `compile_s` is the excess of numba's first call, `speedup` is against
    the interpreter, and `turns` the number of loop turns after which compiling has paid, if a call saves more than the
    noise. Another result than the interpreter's raises a `Disagreement`.
    """
    numbers, first_s = np.random.default_rng([0, size]).random(size), 0.0
    calls = {
        INTERPRETER: functools.partial(LOOPS[program], numbers.tolist()),
        NUMPY: functools.partial(VECTORISED[program], numbers),
    }
    missing = missing_because(NUMBA)
    if not missing:
        calls[NUMBA] = functools.partial(jitted(program), numbers)
        began = time.perf_counter()
        calls[NUMBA]()
        first_s = time.perf_counter() - began
    expected = calls[INTERPRETER]()
    for variant, call in calls.items():
        if call() != expected:
            raise Disagreement(f"{variant!r} returns another result than {INTERPRETER} for {program!r}")
    timed = compare(calls, check=False)
    rows = [{"variant": variant} | timed.timing(variant).row() for variant in calls]
    if missing:
        return [*rows, {"variant": NUMBA, STATUS: missing}]
    interpreted_ms, compiled_ms = rows[0]["median_ms"], rows[-1]["median_ms"]
    compile_s, gain_ms = max(first_s - compiled_ms / 1e3, 0.0), interpreted_ms - compiled_ms
    rows[-1] |= {"compile_s": compile_s, "speedup": interpreted_ms / compiled_ms}
    if gain_ms > NO_DIFFERENCE * interpreted_ms:
        rows[-1]["turns"] = size * compile_s * 1e3 / gain_ms
    return rows


def jitted(program: str) -> Callable[[Any], Any]:
    """The loop for numba, which compiles it at its first call; `add` is compiled, too."""
    import numba

    numba.njit(lambda numbers: numbers.sum())(np.zeros(2))  # a process's first compilation also starts the compiler
    loop = LOOPS[program]
    return numba.njit(types.FunctionType(loop.__code__, {"add": numba.njit(add)}, loop.__name__))


# Numbers

FAR = 100  # times the longest loop that was timed


@jit.numbers()
def _(rows: pd.DataFrame) -> SimpleNamespace:
    """Milliseconds a call by program and variant at each program's largest size, and numba's gain and cost."""
    programs = list(rows["program"].unique())
    largest = rows[rows["size"] == rows.groupby("program")["size"].transform("max")]
    ms = largest.pivot(index="program", columns="variant", values="median_ms").reindex(programs)
    numba = largest[largest["variant"] == "numba"].set_index("program").reindex(programs)
    shown = pd.DataFrame({"iterations": largest.groupby("program")["size"].max().reindex(programs)})
    shown = shown.join(ms.add_suffix(", ms"))
    shown["numba's speedup"] = numba["speedup"]
    far = numba["turns"] > FAR * shown["iterations"]  # what a loop gains may not grow so long
    shown["compile, s"], shown["break-even iterations"] = numba["compile_s"], numba["turns"].mask(far)
    return SimpleNamespace(table=shown.rename_axis("program").reset_index())
