"""Every Triton kernel compiles for GPUs that aren't there: what it reads at once, its registers, and what spills.

`CAPABILITIES=80,86,89,100` in the environment compiles for others.
"""

import os
import re

import pytest

pytest.importorskip("triton")

from interpreted import compile_kernels

from helpers.kernels import norm_kernels
from helpers.kernels.norms import WIDEST
from helpers.swiglu import triton_kernels as swiglu

CAPABILITIES = [int(each) for each in os.environ.get("CAPABILITIES", "75,90").split(",")]
REGISTERS, SHARED = 65536, 227 * 1024  # of a multiprocessor of 9.0
WIDE_LOAD, WIDE_STORE = r"ld\.global\S*\.v4\.b32", r"st\.global\S*\.v4\.b32"
AHEAD = r"cp\.async\.cg\.shared\.global \[.*\], \[.*\], 0x10"  # to shared memory, 16 bytes for each thread
TYPES = {75: ("*fp16",)}  # before 8.0 no unit multiplies bf16
SPILLED = 320  # bytes that the widest rows may cost a thread
WIDTHS = (100, 2048, WIDEST)


def of_norm(direction, width, centred, dtype, capability, branch=None):
    """LayerNorm if `centred`, else RMSNorm, of a sum with a residual branch if that has a type."""
    rows, block, warps = norm_kernels.tile(width, 16 if direction == "forward" else 8)
    mean, bias = ("*fp32", dtype) if centred else (None, None)
    shape = {"WIDTH": width, "ROWS": rows, "BLOCK": block}
    types = {"x_at": dtype, "weight_at": dtype, "mean_at": mean, "rstd_at": "*fp32", "count": "i32", "x_step": "i32"}
    if direction == "forward":
        types |= {"bias_at": bias, "y_at": dtype, "eps": "fp32"}
        types |= {"branch_at": branch, "total_at": branch, "branch_step": "i32"}
        constants, options = shape | {"CENTRED": centred}, {}
    else:
        types |= {"dy_at": dtype, "dx_at": dtype, "shares_at": "*fp32", "dy_step": "i32"}
        types |= {"further_at": branch, "further_step": "i32"}
        row_bytes = 2 * (4 if dtype == "*fp32" else 2) * rows * block
        constants = shape | {"WEIGHT": True, "BIAS": centred, "STAGES": norm_kernels.stages(row_bytes)}
        options = {"maxnreg": norm_kernels.REGISTERS}
    return norm_kernels.__name__, f"_{direction}_kernel", types, constants, {"num_warps": warps} | options, capability


def of_sum(dtype, capability):
    constants = {"WIDTH": 4096, "ROWS": norm_kernels.SHARES, "COLUMNS": norm_kernels.COLUMNS}
    types = {"shares_at": "*fp32", "sums_at": dtype, "count": "i32"}
    return norm_kernels.__name__, "_sum_kernel", types, constants, {"num_warps": 4}, capability


def of_swiglu(kernel, arguments, constants, dtype, capability):
    packed = {"packed_g_at": "*i8", "packed_u_at": "*i8", "scale_g_at": "*fp32", "scale_u_at": "*fp32"}
    types = {name: packed.get(name, dtype) for name in arguments} | {"elements": "i32"}
    return swiglu.__name__, kernel, types, constants, {"num_warps": 8}, capability


def swiglus(dtype, capability):
    block, group = {"BLOCK": swiglu.BLOCK}, {"GROUP": swiglu.GROUP, "ROWS": swiglu.ROWS}
    packed = ["packed_g_at", "packed_u_at", "scale_g_at", "scale_u_at"]
    differentiated = ["dz_at", "g_at", "s_at", "u_at", "dg_at", "du_at"]
    kernels = [("_activate", ["g_at", "u_at", "z_at", "s_at"], {"KEEP": keep} | block) for keep in (False, True)]
    kernels += [("_differentiate", differentiated, {"SAVED": saved} | block) for saved in (False, True)]
    kernels += [("_activate_packing", ["g_at", "u_at", "z_at", *packed], group)]
    kernels += [("_differentiate_packed", ["dz_at", *packed, "dg_at", "du_at"], group)]
    return [of_swiglu(*each, dtype, capability) for each in kernels]


@pytest.mark.long
@pytest.mark.parametrize("capability", CAPABILITIES)
def test_every_kernel_compiles_and_only_the_widest_rows_spill(capability):
    narrow, wide = [], []
    for dtype in TYPES.get(capability, ("*bf16", "*fp32")):
        narrow += [*swiglus(dtype, capability), of_sum(dtype, capability)]
        for width in WIDTHS:
            group = wide if width == WIDEST else narrow
            group += [of_norm(direction, width, True, dtype, capability) for direction in ("forward", "backward")]
    for branch in (None, "*fp16"):
        narrow += [of_norm(d, 2048, False, "*fp16", capability, branch) for d in ("forward", "backward")]
    found = compile_kernels(narrow + wide)
    assert all(f".target sm_{capability}" in each["ptx"] for each in found)
    spilled = [each["spilled"] for each in found]
    assert max(spilled[: len(narrow)]) == 0
    assert max(spilled[len(narrow) :]) <= SPILLED


@pytest.mark.long
def test_bf16_moves_16_bytes_at_once_and_a_norms_backward_prefetches_with_all_its_programs_at_once():
    widths = (128, 2048, 8192)
    backward = [of_norm("backward", width, width > 128, "*bf16", 90) for width in widths]
    backward.append(of_norm("backward", 2048, False, "*bf16", 90, "*bf16"))
    forward = [of_norm("forward", 2048, centred, "*bf16", 90) for centred in (False, True)]
    forward.append(of_norm("forward", 2048, False, "*bf16", 90, "*bf16"))
    found = compile_kernels(backward + swiglus("*bf16", 90) + forward)
    for each in found[len(backward) :]:
        assert re.search(WIDE_LOAD, each["ptx"]) and re.search(WIDE_STORE, each["ptx"])
    for width, each in zip((*widths, 2048), found[: len(backward)], strict=True):
        assert re.search(AHEAD, each["ptx"]) and re.search(WIDE_STORE, each["ptx"])
        warps = norm_kernels.tile(width, 8)[2]
        programs = norm_kernels.RESIDENT // (32 * warps)
        assert programs * 32 * warps * each["registers"] <= REGISTERS
        assert programs * (each["shared"] + 1024) <= SHARED
