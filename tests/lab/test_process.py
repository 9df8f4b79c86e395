"""A measurement in a process of its own."""

import os
import signal

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
