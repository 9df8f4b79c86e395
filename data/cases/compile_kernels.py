"""Compiles Triton kernels for GPUs that aren't there, of jobs that stand on stdin as JSON.

It runs in a process of its own, for the interpreter is chosen when Triton is imported.
"""

import importlib
import json
import re
import subprocess
import sys
import tempfile
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
        "registers": int(re.search(r"REG:(\d+)", used)[1]),
        "spilled": int(re.search(r"STACK:(\d+)", used)[1]),
        "shared": found.metadata.shared,
    }


print(json.dumps([compiled(*job) for job in json.load(sys.stdin)]))
