import json
import math
import os
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from helpers.lab import Disagreement
from helpers.lab.machine import missing_because
from helpers.pipelines import jit
from helpers.pipelines.jit import (
    CACHED,
    INTERPRETER,
    NUMBA,
    NUMPY,
    PYPY,
    VARIANTS,
    VECTORISED,
    break_even_turns,
    draw,
    measure_jit,
    plain,
    prepared,
    process_start,
)
from helpers.pipelines.jit_loops import LOOPS

HERE = [name for name in (INTERPRETER, NUMBA, CACHED, NUMPY) if not missing_because(*VARIANTS[name])]


@settings(deadline=None, max_examples=60)
@given(st.sampled_from(list(LOOPS)), st.integers(1, 500), st.integers(0, 99))
def test_numpy_returns_what_the_loop_returns(program, size, seed):
    numbers = draw(program, size, seed)
    assert plain(VECTORISED[program](numbers)) == plain(LOOPS[program](numbers.tolist()))


@pytest.mark.parametrize("program", LOOPS)
def test_every_variant_returns_what_the_loop_returns_and_is_timed(program):
    """`measure_jit` compares the results itself; sizes are small, and compiling is not."""
    rows = measure_jit(program, 200, [*HERE, PYPY], seconds=0.001)
    assert [row["variant"] for row in rows] == [*HERE, PYPY]
    for row in rows:
        assert (row["program"], row["size"]) == (program, 200)
        if row["status"] != "ok":
            assert row == {"program": program, "variant": PYPY, "size": 200, "status": missing_because(*VARIANTS[PYPY])}
            continue
        assert row["n"] >= 20
        assert row["p20_ms"] <= row["median_ms"] <= row["p80_ms"]
        assert (row["compile_s"] == 0) == (row["variant"] in (INTERPRETER, NUMPY)) or row["variant"] == PYPY


@pytest.mark.skipif(NUMBA not in HERE, reason="numba is not installed")
def test_code_kept_on_disk_is_read_not_compiled():
    given_numbers = draw("integers", 50)
    with prepared(CACHED, "integers", given_numbers) as loop:
        loop(given_numbers)
        assert sum(loop.stats.cache_hits.values()) == 1
        assert not loop.stats.cache_misses
    with prepared(NUMBA, "integers", given_numbers) as loop:
        assert not loop.signatures  # not compiled before its first call
        loop(given_numbers)
        assert len(loop.signatures) == 1


@pytest.mark.skipif(NUMBA not in HERE, reason="numba is not installed")
def test_the_folder_of_compiled_code_is_given_back():
    import numba

    before = numba.config.CACHE_DIR
    with prepared(CACHED, "forgetting", draw("forgetting", 50)):
        folder = numba.config.CACHE_DIR
        assert os.listdir(folder)
    assert before == numba.config.CACHE_DIR
    assert not os.path.exists(folder)


def test_forgetting_counts_rights_that_turn_wrong():
    right = np.array([[1, 1, 0, 1], [0, 1, 1, 0], [1, 1, 0, 0]], dtype=bool)
    assert LOOPS["forgetting"](right.tolist()) == 3


def test_packing_fills_windows_in_order():
    assert LOOPS["packing"]([1000, 1000, 100, 2048, 1]) == (4, 48 + 1948 + 0 + 2047)


@given(st.floats(0.01, 5), st.floats(0.2, 100), st.floats(1.5, 200), st.integers(10, 10**6))
def test_at_the_break_even_both_variants_have_taken_the_same_time(compile_s, ms, speedup, size):
    calls = break_even_turns(ms, ms / speedup, compile_s, size) / size
    assert calls * ms == pytest.approx(compile_s * 1e3 + calls * ms / speedup)


def test_a_variant_that_saves_nothing_never_pays():
    assert break_even_turns(1.0, 0.99, 0.5, 10) == break_even_turns(1.0, 7.0, 0.1, 10) == math.inf


@pytest.mark.skipif(NUMBA not in HERE, reason="numba is not installed")
def test_compiled_rows_tell_speedup_and_break_even_against_the_interpreter():
    interpreted, compiled = measure_jit("forgetting", 100_000, [INTERPRETER, NUMBA], seconds=0.01)
    assert "speedup" not in interpreted
    assert compiled["speedup"] == pytest.approx(interpreted["median_ms"] / compiled["median_ms"])
    gain_ms = interpreted["median_ms"] - compiled["median_ms"]
    assert compiled["turns"] * gain_ms / 100_000 == pytest.approx(compiled["compile_s"] * 1e3)


def test_a_variant_with_another_result_is_not_let_through(monkeypatch):
    monkeypatch.setitem(VECTORISED, "integers", lambda numbers: (0, 0))
    with pytest.raises(Disagreement, match="'numpy' returns another result than CPython for 'integers'"):
        measure_jit("integers", 10, [NUMPY])


@pytest.fixture
def pypy(monkeypatch):
    """The interpreter at hand plays PyPy: what is tested is how it is called."""
    monkeypatch.setattr(jit.shutil, "which", lambda name: sys.executable if name == "pypy3" else None)


@pytest.mark.parametrize("program", LOOPS)
def test_pypy_runs_the_same_loops_in_a_process_of_its_own(pypy, program):
    measured = measure_jit(program, 100, [PYPY], seconds=0.01)[0]
    assert measured["status"] == "ok"
    assert measured["n"] >= 20
    assert measured["compile_s"] >= 0


def test_the_programs_import_nothing_until_they_need_it():
    code = "import sys; before = set(sys.modules); import jit_loops; print(sorted(set(sys.modules) - before))"
    environment = os.environ | {"PYTHONPATH": str(jit.SCRIPT.parent)}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "['jit_loops']"


def test_the_first_call_of_a_child_is_not_among_the_repeated():
    command = [sys.executable, str(jit.SCRIPT), "run", "packing", "0"]
    measured = json.loads(subprocess.run(command, input="[5, 6]", capture_output=True, text=True, check=True).stdout)
    assert len(measured["ms"]) == 21
    assert measured["result"] == [1, 2037]


def test_a_process_is_taken_apart(pypy):
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
    rows = measure_jit("packing", 5, [INTERPRETER, NUMBA, CACHED], seconds=0)
    assert [row["status"] for row in rows] == ["ok", "not installed: numba", "not installed: numba"]
    assert process_start(1, repeat=1)[-1] == {"variant": PYPY, "status": "not installed: pypy3"}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("sorting", 5), "program is 'sorting'; valid: 'strings', 'integers'"),
        (("strings", 0), "size is 0"),
        (("strings", 5, ["rust"]), "variant is 'rust'; valid: 'CPython', 'numba'"),
    ],
)
def test_wrong_arguments_are_named(arguments, message):
    with pytest.raises(ValueError, match=message):
        measure_jit(*arguments)
