"""The loops with a GPU's fault: each entry holds, and at tiny sizes each runs with its fault and without on a CPU."""

import math

import pytest
import torch
from gpu_loop_cases import CASES, LOOPS, check_losses, last_losses


def test_each_of_the_twelve_scripts_has_an_entry():
    assert sorted(case["name"] for case in CASES) == sorted(file.stem for file in LOOPS.glob("*.py"))
    assert len(CASES) == 12


@pytest.mark.parametrize("case", CASES, ids=lambda case: case["name"])
def test_an_entry_names_a_line_and_a_gain_with_its_arithmetic(case):
    source = (LOOPS / f"{case['name']}.py").read_text()
    assert source.count(case["line"]) == 1
    assert 0.25 < case["gain"] < 1 and "ms" in case["because"]
    assert "helpers" not in source  # a stranger's script


@pytest.mark.long
@pytest.mark.skipif(torch.cuda.is_available(), reason="tests/gpu goes over them where there is CUDA")
@pytest.mark.parametrize("case", CASES, ids=lambda case: case["name"])
def test_a_loop_runs_with_its_fault_and_without_and_learns_the_same(case):
    slow, fixed = last_losses(case, steps=3)
    assert math.isfinite(slow) and math.isfinite(fixed)
    check_losses(case, slow, fixed)
