"""What tests of Triton kernels share: loops in Triton's interpreter, and compiling for a GPU that isn't there."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[1]


def run_plain_or_interpreted(request, monkeypatch, module) -> str:
    """For a fixture with these two `params`: the kernels of a module in plain torch, or in Triton's interpreter."""
    if request.param == "interpreted":
        pytest.importorskip("triton")
        if torch.cuda.is_available():
            pytest.skip("tests/gpu runs the kernels themselves")
        allow_loops()
        monkeypatch.setattr(module, "on_triton", lambda *tensors: True)
    return request.param


def allow_loops() -> None:
    """Let a tensor of the interpreter bound a loop: from NumPy 2.4 on an array of one element is no integer."""
    from triton.runtime import interpreter

    patch = interpreter._patch_lang_tensor
    if patch.__name__ == "patch_with_index":
        return

    def patch_with_index(tensor, scope) -> None:
        patch(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    interpreter._patch_lang_tensor = patch_with_index


def compile_kernels(jobs: list[tuple[str, str, dict, dict, dict, int]]) -> list[dict]:
    """(module, kernel, types, constants, options, 90 for capability 9.0) -> PTX, registers, bytes spilled, shared.

    A type is Triton's (`*bf16`), or None for an argument that is None; pointers and integers count as multiples of 16.
    """
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "data.cases.compile_kernels"]
    pipes = {"input": json.dumps(jobs), "capture_output": True, "text": True}
    done = subprocess.run(command, **pipes, env=environment, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)
