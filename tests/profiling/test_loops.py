"""The open set of loops with a planted fault: each runs with it and without, and its entry in the manifest holds."""

import json
import sys
from pathlib import Path

import pytest
import torch
import torch._dynamo

from helpers.experiments.profiling.strangers import GPU_CASES, GPU_LOOPS
from helpers.profiling import findings
from helpers.profiling.run_script import run_script

LOOPS = Path(__file__).parents[1] / "loops"
CASES = json.loads((LOOPS / "manifest.json").read_text())


def test_each_script_has_an_entry_and_enough_are_kept_apart():
    assert {case["name"] for case in CASES} == {file.stem for file in LOOPS.glob("*.py")}
    assert len(CASES) >= 24
    assert sum(case["apart"] for case in CASES) >= len(CASES) // 3 - 1 and sum(case["twin"] for case in CASES) >= 8


@pytest.mark.parametrize("case", CASES, ids=lambda case: case["name"])
def test_a_loop_runs_with_its_fault_and_without(case, monkeypatch):
    file = LOOPS / f"{case['name']}.py"
    source = file.read_text()
    assert case["line"] in source and case["findings"] and 15 <= len(source.splitlines()) <= 60
    if case.get("ranks"):
        pytest.skip("needs torchrun")
    program = compile(source, str(file), "exec", dont_inherit=True)
    anomaly, limit = torch.is_anomaly_enabled(), torch._dynamo.config.recompile_limit
    try:
        for arguments in (["--steps", "1"], ["--steps", "1", "--fixed"]):
            assert run_script(program, [str(file), *arguments]) is None
    finally:
        torch.autograd.set_detect_anomaly(anomaly)
        torch._dynamo.config.recompile_limit = limit
    assert sys.modules["__main__"].__name__ != str(file)


def test_each_loop_for_a_gpu_has_an_entry():
    assert set(GPU_CASES) == {file.stem for file in GPU_LOOPS.glob("*.py")} and len(GPU_CASES) == 12
    known = {value for name, value in vars(findings).items() if name.isupper()} | {"Python loop", "garbage collection"}
    for case in GPU_CASES.values():
        assert case["line"] in case["script"].read_text() and set(case["findings"]) <= known
        assert 0 < case["expected_gain"] < 1 and case["arithmetic"]


@pytest.mark.parametrize("name", GPU_CASES)
def test_a_loop_for_a_gpu_runs_on_a_cpu_at_tiny_sizes(name):
    file = GPU_CASES[name]["script"]
    program, precision = compile(file.read_text(), str(file), "exec"), torch.get_float32_matmul_precision()
    for extra in ([], ["--fixed"]):
        try:
            assert run_script(program, [str(file), "--device", "cpu", "--steps", "2", *extra]) is None
        finally:
            torch.set_float32_matmul_precision(precision)
