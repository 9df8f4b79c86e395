"""The kernels compile for a Hopper GPU, which needs no GPU: what they read at once, and that no register spills."""

import re

import pytest

pytest.importorskip("triton")

from interpreted import compile_for_hopper

from helpers.kernels import launch, norms

HALF, FULL, INT = "*bf16", "*fp32", "i32"
REGISTERS, SHARED = 65536, 227 * 1024  # of a multiprocessor
WIDE_LOAD, WIDE_STORE = r"ld\.global\S*\.v4\.b32", r"st\.global\S*\.v4\.b32"
AHEAD = r"cp\.async\.cg\.shared\.global \[.*\], \[.*\], 0x10"  # to shared memory, 16 bytes for each thread
BACKWARD = [("backward", 128, False), ("backward", 2048, False), ("backward", 2048, True), ("backward", 8192, True)]
FORWARD = [("forward", 2048, False), ("forward", 2048, True)]


def job(kernel, types, constants, warps, **options):
    return "helpers.kernels.norms", kernel, types, constants, {"num_warps": warps, **options}


def norm(direction, width, centred):
    """LayerNorm if `centred`, else RMSNorm."""
    rows, block, warps = norms.tile(width, 16 if direction == "forward" else 8)
    mean, bias = (FULL, HALF) if centred else (None, None)
    shape = {"WIDTH": width, "ROWS": rows, "BLOCK": block}
    types = {"x_at": HALF, "weight_at": HALF, "mean_at": mean, "rstd_at": FULL, "count": INT, "x_step": INT}
    if direction == "forward":
        types |= {"bias_at": bias, "y_at": HALF}
        return job("_forward_kernel", types | {"eps": "fp32"}, shape | {"CENTRED": centred}, warps)
    types |= {"dy_at": HALF, "dx_at": HALF, "shares_at": FULL, "dy_step": INT}
    constants = shape | {"WEIGHT": True, "BIAS": centred, "STAGES": launch.stages(4 * rows * block)}
    return job("_backward_kernel", types, constants, warps, maxnreg=norms.REGISTERS)


def add_up():
    constants = {"WIDTH": 4096, "ROWS": norms.SHARES, "COLUMNS": norms.COLUMNS}
    return job("_sum_kernel", {"shares_at": FULL, "sums_at": HALF, "count": INT}, constants, 4)


@pytest.fixture(scope="module")
def hopper():
    jobs = {case: norm(*case) for case in FORWARD + BACKWARD} | {"add up": add_up()}
    return dict(zip(jobs, compile_for_hopper(list(jobs.values())), strict=True))


def test_nothing_spills(hopper):
    assert {name: usage["spilled"] for name, usage in hopper.items() if usage["spilled"]} == {}


@pytest.mark.parametrize("case", FORWARD)
def test_it_reads_and_writes_16_bytes_at_once(hopper, case):
    assert re.search(WIDE_LOAD, hopper[case]["ptx"])
    assert re.search(WIDE_STORE, hopper[case]["ptx"])


@pytest.mark.parametrize("case", BACKWARD)
def test_a_pipeline_brings_16_bytes_at_once_before_they_are_needed(hopper, case):
    assert re.search(AHEAD, hopper[case]["ptx"])
    assert re.search(WIDE_STORE, hopper[case]["ptx"])


@pytest.mark.parametrize("case", BACKWARD)
def test_all_programs_of_a_norms_backward_fit_at_once(hopper, case):
    warps = norms.tile(case[1], 8)[2]
    programs = norms.RESIDENT // (32 * warps)
    assert programs * 32 * warps * hopper[case]["registers"] <= REGISTERS
    assert programs * (hopper[case]["shared"] + 1024) <= SHARED
