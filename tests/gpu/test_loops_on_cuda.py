"""The loops with a GPU's fault, on a GPU: each learns the same without it, and the dearest is named."""

import json
import math
import subprocess
import sys

import pytest
from gpu_loop_cases import CASES, LOOPS, check_losses, last_losses


@pytest.mark.long
@pytest.mark.parametrize("case", CASES, ids=lambda case: case["name"])
def test_a_loop_runs_with_its_fault_and_without_and_learns_the_same(case):
    slow, fixed = last_losses(case, steps=4)
    assert math.isfinite(slow) and math.isfinite(fixed)
    check_losses(case, slow, fixed)


def test_small_kernels_are_named_first(tmp_path):
    """The one loop whose fault is the same at any size that fits a test."""
    case = next(case for case in CASES if case["name"] == "critics_one_by_one")
    command = [sys.executable, "-m", "helpers", "profile", "--json", "--limit", "20", "--output", str(tmp_path / "out")]
    script = [str(LOOPS / "critics_one_by_one.py"), "--steps", "1000000"]
    done = subprocess.run(command + script, capture_output=True, text=True, timeout=120)
    answer = json.loads(done.stdout[done.stdout.index("{") :])
    assert answer["findings"][0]["finding"] in case["findings"], done.stdout
