"""The kernels compile for a Hopper GPU, which needs Triton's compiler and no GPU."""

import re

import pytest

pytest.importorskip("triton")

from interpreted import compile_for_hopper

from helpers.swiglu import triton_kernels as kernels

BLOCK, GROUPS = {"BLOCK": kernels.BLOCK}, {"GROUP": kernels.GROUP, "ROWS": kernels.ROWS}
TYPES = {"packed": "*i8", "scale": "*fp32"}  # by the first word of a name; the others point to bf16
PACKED = "packed_g_at packed_u_at scale_g_at scale_u_at"
JOBS = [
    ("_activate", "g_at u_at z_at s_at", BLOCK | {"KEEP": False}),
    ("_activate", "g_at u_at z_at s_at", BLOCK | {"KEEP": True}),
    ("_differentiate", "dz_at g_at s_at u_at dg_at du_at", BLOCK | {"SAVED": False}),
    ("_differentiate", "dz_at g_at s_at u_at dg_at du_at", BLOCK | {"SAVED": True}),
    ("_activate_packing", f"g_at u_at z_at {PACKED}", GROUPS),
    ("_differentiate_packed", f"dz_at {PACKED} dg_at du_at", GROUPS),
]


def job(kernel, pointers, constants):
    types = {name: TYPES.get(name.partition("_")[0], "*bf16") for name in pointers.split()} | {"elements": "i32"}
    return kernels.__name__, kernel, types, constants, {"num_warps": 8}


def test_bf16_is_read_and_written_in_16_bytes_and_nothing_spills():
    for kernel in compile_for_hopper([job(*each) for each in JOBS]):
        assert re.search(r"ld\.global\S*\.v4\.b32", kernel["ptx"])
        assert re.search(r"st\.global\S*\.v4\.b32", kernel["ptx"])
        assert kernel["spilled"] == 0 and ".local" not in kernel["ptx"]
