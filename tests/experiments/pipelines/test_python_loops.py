import math
import sys

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from helpers.experiments.pipelines import python_loops
from helpers.experiments.pipelines.python_loops import (
    INTERPRETER,
    LOOPS,
    NUMBA,
    NUMPY,
    PYPY,
    VECTORISED,
    break_even_turns,
    measure_jit,
    process_start,
)
from helpers.lab import Disagreement
from helpers.lab.machine import missing_because

needs_numba = pytest.mark.skipif(bool(missing_because(NUMBA)), reason="numba is not installed")


@settings(deadline=None, max_examples=60)
@given(st.sampled_from(list(LOOPS)), st.integers(1, 500), st.integers(0, 99))
def test_numpy_returns_what_the_loop_returns(program, size, seed):
    numbers = np.random.default_rng(seed).random(size)
    assert python_loops._plain(VECTORISED[program](numbers)) == python_loops._plain(LOOPS[program](numbers.tolist()))


@needs_numba
@pytest.mark.parametrize("program", LOOPS)
def test_every_variant_is_timed_and_numba_has_what_compiling_costs_and_brings(program):
    """`measure_jit` compares the results itself."""
    rows = measure_jit(program, 200)
    assert [row["variant"] for row in rows] == [INTERPRETER, NUMPY, NUMBA]
    assert all(row["n"] >= 5 and row["p20_ms"] <= row["median_ms"] <= row["p80_ms"] for row in rows)
    compiled = rows[-1]
    assert compiled["compile_s"] > 0
    assert compiled["speedup"] == pytest.approx(rows[0]["median_ms"] / compiled["median_ms"])


@given(st.floats(0.01, 5), st.floats(0.2, 100), st.floats(1.5, 200), st.integers(10, 10**6))
def test_at_the_break_even_both_variants_have_taken_the_same_time(compile_s, ms, speedup, size):
    calls = break_even_turns(ms, ms / speedup, compile_s, size) / size
    assert calls * ms == pytest.approx(compile_s * 1e3 + calls * ms / speedup)


def test_a_variant_that_saves_nothing_never_pays():
    assert break_even_turns(1.0, 0.99, 0.5, 10) == break_even_turns(1.0, 7.0, 0.1, 10) == math.inf


def test_a_variant_with_another_result_is_not_let_through(monkeypatch):
    monkeypatch.setitem(VECTORISED, "integers", lambda numbers: (0, 0))
    with pytest.raises(Disagreement, match="'numpy' returns another result than CPython for 'integers'"):
        measure_jit("integers", 10)


def test_a_process_is_taken_apart(monkeypatch):
    """The interpreter at hand plays PyPy: what is tested is how it is called."""
    monkeypatch.setattr(python_loops.shutil, "which", lambda name: sys.executable if name == "pypy3" else None)
    rows = process_start(3, repeat=3)
    parts = ["start", "start, import random", "demo", "demo, its loop"]
    assert [(row["variant"], row["part"]) for row in rows] == [
        (name, part) for name in (INTERPRETER, PYPY) for part in parts
    ]
    ms = {row["part"]: row["median_ms"] for row in rows[:4]}
    assert ms["demo, its loop"] < ms["demo"]
    assert all(row["n"] == 3 for row in rows)


def test_what_is_not_installed_has_rows_that_say_so(monkeypatch):
    monkeypatch.setattr("helpers.lab.machine.installed", lambda package: None)
    assert measure_jit("integers", 5)[-1] == {"variant": NUMBA, "status": "not installed: numba"}
    assert process_start(1, repeat=1)[-1] == {"variant": PYPY, "status": "not installed: pypy3"}
