"""The loops with a GPU's fault, and a run of one in this process, which is afterwards as it was."""

import contextlib
import io
import json
import os
from pathlib import Path
from unittest import mock

import pytest
import torch

from helpers.script.running import compiled, run_script

LOOPS = Path(__file__).parents[1] / "data" / "loops" / "gpu"
CASES = json.loads((LOOPS / "manifest.json").read_text())
TOLERANCE = {"equal": {"rel": 0, "abs": 0}, "close": {"rel": 2e-3}}


def last_losses(case: dict, steps: int) -> tuple[float, float]:
    """The losses of the last of some tiny steps, with the fault and without it."""
    return _last_loss(case, steps), _last_loss(case, steps, "--fixed")


def check_losses(case: dict, slow: float, fixed: float) -> None:
    if case["losses"]:
        assert fixed == pytest.approx(slow, **TOLERANCE[case["losses"]])


def _last_loss(case: dict, steps: int, *arguments: str) -> float:
    script, printed = LOOPS / f"{case['name']}.py", io.StringIO()
    precision, benchmark = torch.get_float32_matmul_precision(), torch.backends.cudnn.benchmark
    try:
        with mock.patch.dict(os.environ), contextlib.redirect_stdout(printed):
            assert run_script(compiled(script), [str(script), "--tiny", "--steps", str(steps), *arguments]) is None
    finally:
        torch.set_float32_matmul_precision(precision)
        torch.backends.cudnn.benchmark = benchmark
        if torch.cuda.is_available():
            torch.cuda.set_per_process_memory_fraction(1.0)
    return float(printed.getvalue().split("loss ")[-1])
