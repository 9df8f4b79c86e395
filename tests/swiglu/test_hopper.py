"""The kernels compile for a Hopper GPU, which needs Triton's compiler and no GPU."""

import os
import re
import subprocess
import sys

import pytest

pytest.importorskip("triton")

PROGRAM = """
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from helpers.swiglu import triton_kernels as kernels

def ptx(kernel, pointers, **constants):
    types = {"s": "*fp32", "p": "*i8"}
    signature = {name: types.get(kind, "*bf16") for name, kind in pointers.items()} | {"elements": "i32"}
    names = [*signature, *constants]
    aligned = {(i,): [["tt.divisibility", 16]] for i in range(len(signature))}
    constant = {(names.index(name),): value for name, value in constants.items()}
    source = ASTSource(kernel, signature | dict.fromkeys(constants, "constexpr"), constant, aligned)
    return triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": 8}).asm["ptx"]

names = lambda text: {name.split(":")[0]: name.partition(":")[2] for name in text.split()}
block, group = {"BLOCK": kernels.BLOCK}, {"GROUP": kernels.GROUP, "ROWS": kernels.ROWS}
packed = "packed_g_at:p packed_u_at:p scale_g_at:s scale_u_at:s"
for text in (
    ptx(kernels._activate, names("g_at u_at z_at s_at"), KEEP=False, **block),
    ptx(kernels._activate, names("g_at u_at z_at s_at"), KEEP=True, **block),
    ptx(kernels._differentiate, names("dz_at g_at s_at u_at dg_at du_at"), SAVED=False, **block),
    ptx(kernels._differentiate, names("dz_at g_at s_at u_at dg_at du_at"), SAVED=True, **block),
    ptx(kernels._activate_packing, names("g_at u_at z_at " + packed), **group),
    ptx(kernels._differentiate_packed, names("dz_at " + packed + " dg_at du_at"), **group),
):
    print(text, "=== end of kernel")
"""


def test_bf16_is_read_and_written_in_16_bytes_and_nothing_spills():
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    kernels = done.stdout.split("=== end of kernel")[:-1]
    assert len(kernels) == 6
    for ptx in kernels:
        assert ".target sm_90" in ptx
        assert re.search(r"ld\.global\S*\.v4\.b32", ptx)
        assert re.search(r"st\.global\S*\.v4\.b32", ptx)
        assert ".local" not in ptx
