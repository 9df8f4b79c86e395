"""The loops whose fault exists on a GPU alone run there, with the fault and without."""

import subprocess
import sys

import pytest

from helpers.experiments.profiling.strangers import GPU_CASES


@pytest.mark.parametrize("name", GPU_CASES)
@pytest.mark.parametrize("extra", [[], ["--fixed"]], ids=["fault", "fixed"])
def test_a_loop_runs(name, extra):
    command = [sys.executable, str(GPU_CASES[name]["script"]), "--steps", "3", *extra]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
