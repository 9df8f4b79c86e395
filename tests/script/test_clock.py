"""A script's own clock: what lies between the lines that read it, and what it reads beside a step."""

import pickle
import time

import pytest

from helpers.findings.caveats import own_clock
from helpers.script import hooks
from helpers.script.clock import Clock, Reading, State
from helpers.script.observation import Observation

SCRIPT = """
import time
from time import perf_counter
begin = time.time()
for step in range(3):
    ended()
    took = time.time() - begin
    whole = perf_counter() - 1.0
"""


def run(script=SCRIPT):
    """What a clock saw of a script of three iterations, and the script's variables."""
    iterations = 0

    def ended():
        nonlocal iterations
        iterations += 1

    clock, variables = Clock(lambda: State(iterations, max(iterations - 1, 0), 0.0, 0)), {"ended": ended}
    with hooks.wrap(clock.arounds()):
        exec(compile(script, "/home/me/train.py", "exec"), variables)
    return clock, variables


def test_a_measurement_knows_its_lines_and_how_many_iterations_ended_in_it():
    clock, variables = run()
    ((begin, end, spans),) = clock.data()
    assert (begin, end) == (("/home/me/train.py", 4), ("/home/me/train.py", 7))
    assert [span[2] for span in spans] == [1, 2, 3] and all(span[3] for span in spans)
    assert type(variables["took"]) is float and type(variables["whole"]) is float
    assert isinstance(variables["begin"], Reading) and type(pickle.loads(pickle.dumps(variables["begin"]))) is float
    assert not isinstance(time.time(), Reading)


def told(*spans, padding=(), step_ms=100.0):
    """What is said of measurements (seconds, seconds away, iterations, first among them, evaluated, pending)."""
    seen = Observation(clock=[[["/home/me/train.py", 4], ["/home/me/train.py", 9], spans]], padding=list(padding))
    return [note.text for note in own_clock(seen, step_ms)]


@pytest.mark.parametrize(
    ("spans", "words"),
    [
        ([(0.1, 0.0, 1, False, False, False)] * 9, "reads 100 ms an iteration, a step takes 100 ms."),
        ([(1.5, 0.5, 10, False, False, False)] * 9, "reads 100 ms an iteration, a step takes 100 ms."),
        ([(9.9, 0.0, 10, True, False, False), (11.9, 0.0, 20, True, False, False)], "595 ms an iteration"),
        ([(9.9, 0.0, 10, True, False, False)], "contains the first iteration (compilation"),
        ([(3.0, 0.0, 10, False, True, False)] * 3, "it contains evaluation"),
        ([(0.01, 0.0, 0, False, False, True)] * 3, "stops before the device is done"),
        ([(0.01, 0.0, 0, False, False, False)] * 3, "it holds a part of an iteration"),
        ([(0.05, 0.0, 1, False, False, False)] * 3, "something of an iteration lies outside"),
    ],
)
def test_a_clock_that_reads_something_else_than_a_step_is_told_of_with_the_reason(spans, words):
    (text,) = told(*spans)
    assert words in f"{text}." and "train.py:4 to train.py:9" in text


def test_a_rate_of_positions_counts_padding_and_without_a_clock_nothing_is_said():
    (text,) = told((0.1, 0.0, 1, False, False, False), padding=[100, 60, 0])
    assert "60% of the positions are padding" in text and "2.5× that of tokens" in text
    assert list(own_clock(Observation(), 100.0)) == []
