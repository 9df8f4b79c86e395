"""What tests of Triton kernels share: loops in Triton's interpreter, and compiling for a GPU that isn't there."""

import json
import os
import subprocess
import sys

import pytest
import torch


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


# Runs in a process of its own, for the interpreter is chosen when Triton is imported.
COMPILER = """
import importlib, json, re, subprocess, sys, tempfile
from pathlib import Path
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

def compiled(module, kernel, types, constants, options, capability):
    kernel = getattr(importlib.import_module(module), kernel)
    signature = {n: types.get(n) or "constexpr" for n in kernel.arg_names}
    values = {n: None for n, kind in types.items() if kind is None} | constants
    constant = {(kernel.arg_names.index(n),): value for n, value in values.items()}
    divisible = [n for n, kind in types.items() if kind and (kind[0] == "*" or kind == "i32")]
    aligned = {(kernel.arg_names.index(n),): [["tt.divisibility", 16]] for n in divisible}
    source = ASTSource(kernel, signature, constant, aligned)
    found = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
    reader = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(found.asm["cubin"])
        file.flush()
        used = subprocess.run([reader, "-res-usage", file.name], capture_output=True, text=True, check=True).stdout
    return {
        "ptx": found.asm["ptx"],
        "registers": int(re.search(r"REG:(\\d+)", used)[1]),
        "spilled": int(re.search(r"STACK:(\\d+)", used)[1]),
        "shared": found.metadata.shared,
    }

print(json.dumps([compiled(*job) for job in json.load(sys.stdin)]))
"""


def compile_kernels(jobs: list[tuple[str, str, dict, dict, dict, int]]) -> list[dict]:
    """(module, kernel, types, constants, options, 90 for capability 9.0) -> PTX, registers, bytes spilled, shared.

    A type is Triton's (`*bf16`), or None for an argument that is None; pointers and integers count as multiples of 16.
    """
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-c", COMPILER], input=json.dumps(jobs), capture_output=True, text=True, env=environment
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)
