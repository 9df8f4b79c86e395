"""The open set of loops with a planted fault: each runs with it and without, and its entry in the manifest holds."""

import json
import sys
from pathlib import Path

import pytest
import torch
import torch._dynamo

from helpers.script.running import run_script

LOOPS = Path(__file__).parents[2] / "data" / "loops"
CASES = json.loads((LOOPS / "manifest.json").read_text())


def test_each_script_has_an_entry_and_enough_are_kept_apart():
    assert {case["name"] for case in CASES} == {file.stem for file in LOOPS.glob("*.py")}
    assert len(CASES) >= 24
    assert sum(case["apart"] for case in CASES) >= len(CASES) // 3 - 1 and sum(case["twin"] for case in CASES) >= 8


@pytest.mark.long
@pytest.mark.parametrize("case", CASES, ids=lambda case: case["name"])
def test_a_loop_runs_with_its_fault_and_without(case, monkeypatch):
    file = LOOPS / f"{case['name']}.py"
    source = file.read_text()
    assert case["line"] in source and 15 <= len(source.splitlines()) <= 60
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
