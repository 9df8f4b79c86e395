import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from helpers.chapters.pipelines.jit import INTERPRETER, LOOPS, NUMBA, NUMPY, VECTORISED, jit
from helpers.lab import Disagreement
from helpers.lab.machine import missing_because


@settings(deadline=None, max_examples=60)
@given(st.sampled_from(list(LOOPS)), st.integers(1, 500), st.integers(0, 99))
def test_numpy_returns_what_the_loop_returns(program, size, seed):
    numbers = np.random.default_rng(seed).random(size)
    assert VECTORISED[program](numbers) == LOOPS[program](numbers.tolist())


@pytest.mark.skipif(bool(missing_because(NUMBA)), reason="numba is not installed")
@pytest.mark.parametrize("program", LOOPS)
def test_every_variant_is_timed_and_numba_has_what_compiling_costs_and_brings(program):
    """`jit` compares the results itself."""
    rows = jit.measure(program, 200)
    assert [row["variant"] for row in rows] == [INTERPRETER, NUMPY, NUMBA]
    assert all(row["n"] >= 5 and row["p20_ms"] <= row["median_ms"] <= row["p80_ms"] for row in rows)
    interpreted, _, compiled = rows
    assert compiled["compile_s"] > 0
    assert compiled["speedup"] == pytest.approx(interpreted["median_ms"] / compiled["median_ms"])
    if compiled["speedup"] < 1.03:
        assert "turns" not in compiled
    else:
        calls, taken_s = compiled["turns"] / 200, compiled["compile_s"]
        assert calls * interpreted["median_ms"] == pytest.approx(1e3 * taken_s + calls * compiled["median_ms"])


def test_a_variant_with_another_result_is_not_let_through(monkeypatch):
    monkeypatch.setitem(VECTORISED, "integers", lambda numbers: (0, 0))
    with pytest.raises(Disagreement, match="'numpy' returns another result than CPython for 'integers'"):
        jit.measure("integers", 10)


def test_what_is_not_installed_has_rows_that_say_so(monkeypatch):
    monkeypatch.setattr("helpers.lab.machine.installed", lambda package: None)
    assert jit.measure("integers", 5)[-1] == {"variant": NUMBA, "status": "not installed: numba"}
