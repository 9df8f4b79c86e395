"""The loops with a GPU's fault: each entry holds, and at tiny sizes each runs with its fault and without on a CPU."""

import math

import pytest
import torch
from gpu_loop_cases import CASES, LOOPS, check_losses, last_losses

from helpers.chapters.tool.gpu_loops import MOST_EXPENSIVE, gpu_loops


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


def test_each_has_a_row_in_the_table_and_the_most_expensive_are_fixed_by_hand_too():
    assert [row["loop"] for row in gpu_loops.configurations("big-gpu")] == [case["name"] for case in CASES]
    gains = {case["name"]: case["gain"] for case in CASES}
    assert len(MOST_EXPENSIVE) == 3
    assert min(gains[name] for name in MOST_EXPENSIVE) >= sorted(gains.values())[-3]


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without CUDA")
def test_without_a_gpu_the_table_says_what_it_needs():
    assert set(gpu_loops("small")["status"]) == {"needs CUDA"}
