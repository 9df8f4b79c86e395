"""A measurement in a process of its own."""

import os
import signal
import subprocess
import sys

import pytest

from helpers.lab import in_fresh_process


def test_a_function_runs_elsewhere_with_variables_that_are_there_only_and_its_result_comes_back():
    name = "MALLOC_TRIM_THRESHOLD_"
    assert in_fresh_process(os.getenv, name, environment={name: "7"}) == "7"
    assert name not in os.environ


def test_an_error_comes_back():
    with pytest.raises(ValueError, match="invalid literal"):
        in_fresh_process(int, "x")


def test_a_killed_process_is_out_of_memory():
    with pytest.raises(MemoryError, match="killed"):
        in_fresh_process(signal.raise_signal, signal.SIGKILL)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT])
def test_it_ends_with_the_process_that_started_it(number):
    waits = "import time; print('here', flush=True); time.sleep(1000)"
    heard = "import signal; signal.signal(2, signal.default_int_handler)"  # a shell's background ignores it
    program = f"{heard}; from helpers.lab import in_fresh_process; in_fresh_process(exec, {waits!r})"
    line = [sys.executable, "-c", program]
    starter = subprocess.Popen(line, stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True)
    assert starter.stdout.readline() == b"here\n"
    (os.killpg if number == signal.SIGINT else os.kill)(starter.pid, number)  # Ctrl-C is sent to all
    _, errors = starter.communicate(timeout=500)  # ends when no process has the pipes any more
    assert starter.returncode == -number
    assert errors.count(b"Traceback") == (number == signal.SIGINT)  # of the starter alone
