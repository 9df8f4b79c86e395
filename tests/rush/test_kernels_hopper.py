"""The kernels compile for a Hopper GPU, which needs no GPU: what they read at once, and that no register spills."""

import re

import pytest

pytest.importorskip("triton")

from interpreted import compile_for_hopper

from helpers.rush.kernels import adamw_triton, cross_entropy_triton, norms_triton

HALF, FULL, LONG, INT = "*bf16", "*fp32", "*i64", "i32"
REGISTERS, SHARED = 65536, 227 * 1024  # of a multiprocessor
WIDE_LOAD, WIDE_STORE = r"ld\.global\S*\.v4\.b32", r"st\.global\S*\.v4\.b32"
AHEAD = r"cp\.async\.cg\.shared\.global \[.*\], \[.*\], 0x10"  # to shared memory, 16 bytes for each thread
BACKWARD = [("backward", 128, False), ("backward", 2048, False), ("backward", 2048, True), ("backward", 8192, True)]
FORWARD = [("forward", 2048, False), ("forward", 2048, True)]


def job(module, kernel, types, constants, warps, **options):
    return f"helpers.rush.kernels.{module}", kernel, types, constants, {"num_warps": warps, **options}


def norm(way, width, centred):
    """LayerNorm if `centred`, else RMSNorm."""
    rows, block, warps = norms_triton.tile(width, 16 if way == "forward" else 8)
    mean, bias = (FULL, HALF) if centred else (None, None)
    shape = {"WIDTH": width, "ROWS": rows, "BLOCK": block}
    types = {"x_at": HALF, "weight_at": HALF, "mean_at": mean, "rstd_at": FULL, "count": INT, "x_step": INT}
    if way == "forward":
        types |= {"residual_at": None, "bias_at": bias, "y_at": HALF, "total_at": HALF, "residual_step": INT}
        return job("norms_triton", "_forward", types | {"eps": "fp32"}, shape | {"CENTRED": centred}, warps)
    types |= {"dy_at": HALF, "more_at": None, "dx_at": HALF, "shares_at": FULL, "dy_step": INT, "more_step": INT}
    constants = shape | {"WEIGHT": True, "BIAS": centred, "STAGES": norms_triton.stages(4 * rows * block)}
    return job("norms_triton", "_backward", types, constants, warps, maxnreg=norms_triton.REGISTERS)


def rope():
    steps = [f"{x}_{of}" for x in ("q", "k", "q_out", "k_out") for of in ("batch", "token", "head")]
    types = dict.fromkeys(("q_at", "k_at", "q_out_at", "k_out_at"), HALF) | {"cos_at": FULL, "sin_at": FULL}
    types |= dict.fromkeys([*steps, "cos_batch", "cos_token", "tokens"], INT)
    heads = {"HEADS_Q": 32, "HEADS_K": 8, "HALF": 32, "BLOCK_Q": 32, "BLOCK_K": 8, "BLOCK": 32, "INVERSE": False}
    return job("rope_triton", "_rotate", types, heads, 1)


def adamw(lr_on_device):
    types = {"table_at": LONG, "chunks_at": "*i32", "factors_at": FULL, "grad_scale_at": FULL, "found_inf_at": FULL}
    types |= dict.fromkeys(["beta1", "beta2", "rest1", "rest2", "eps", "weight_decay"], "fp32")
    types["lr"] = FULL if lr_on_device else "fp32"
    constants = {"COLUMNS": adamw_triton.COLUMNS, "CHUNK": adamw_triton.CHUNK, "VECTOR": True}
    constants["LR_ON_DEVICE"] = lr_on_device
    return job("adamw_triton", "_update", types, constants, 4)


def cross_entropy():
    block = cross_entropy_triton.BLOCK
    types = {"logits_at": HALF, "target_at": LONG, "losses_at": FULL, "factor_at": FULL, "step": INT}
    constants = {"V": 128256, "BLOCK": block, "WRITE": True, "STAGES": cross_entropy_triton.stages(2 * block)}
    return job("cross_entropy_triton", "_losses", types | {"ignore_index": INT}, constants, block // 512)


def small_ones():
    types = {"table_at": LONG, "factors_at": FULL, "lr": FULL, "found_inf_at": FULL, "count": INT}
    types |= {"log2_beta1": "fp32", "log2_beta2": "fp32"}
    constants = {"LR_ON_DEVICE": True, "COLUMNS": adamw_triton.COLUMNS, "BLOCK": adamw_triton.AT_A_TIME}
    advance = job("adamw_triton", "_advance", types, constants, 4)
    constants = {"V": 50257, "BLOCK": cross_entropy_triton.SCALE_BLOCK}
    scale = job("cross_entropy_triton", "_scale", {"gradient_at": HALF, "by_at": FULL, "step": INT}, constants, 8)
    constants = {"WIDTH": 4096, "ROWS": norms_triton.SHARES, "COLUMNS": norms_triton.COLUMNS}
    add_up = job("norms_triton", "_add_up", {"shares_at": FULL, "sums_at": HALF, "count": INT}, constants, 4)
    return {"advance": advance, "scale": scale, "add up": add_up}


@pytest.fixture(scope="module")
def hopper():
    jobs = {case: norm(*case) for case in FORWARD + BACKWARD}
    jobs |= {"AdamW": adamw(False), "AdamW, rate on the device": adamw(True)}
    jobs |= {"rope": rope(), "cross-entropy": cross_entropy()} | small_ones()
    return dict(zip(jobs, compile_for_hopper(list(jobs.values())), strict=True))


def test_nothing_spills(hopper):
    assert {name: found["spilled"] for name, found in hopper.items() if found["spilled"]} == {}


@pytest.mark.parametrize("case", [*FORWARD, "rope", "AdamW"])
def test_it_reads_and_writes_16_bytes_at_once(hopper, case):
    assert re.search(WIDE_LOAD, hopper[case]["ptx"])
    assert re.search(WIDE_STORE, hopper[case]["ptx"])


@pytest.mark.parametrize("case", [*BACKWARD, "cross-entropy"])
def test_a_pipeline_brings_16_bytes_at_once_before_they_are_needed(hopper, case):
    assert re.search(AHEAD, hopper[case]["ptx"])
    assert re.search(WIDE_STORE, hopper[case]["ptx"])


@pytest.mark.parametrize("case", BACKWARD)
def test_all_programs_of_a_norms_backward_fit_at_once(hopper, case):
    warps = norms_triton.tile(case[1], 8)[2]
    programs = norms_triton.RESIDENT // (32 * warps)
    assert programs * 32 * warps * hopper[case]["registers"] <= REGISTERS
    assert programs * (hopper[case]["shared"] + 1024) <= SHARED


def test_a_long_row_of_logits_has_a_multiprocessor_to_itself(hopper):
    assert 2 * 1024 * hopper["cross-entropy"]["registers"] > REGISTERS


def test_adamw_moves_every_element_once(hopper):
    # 8 elements a thread in fp32: two accesses each for four tensors in and three out.
    assert len(re.findall(WIDE_LOAD, hopper["AdamW"]["ptx"])) == 8
    assert (
        len(re.findall(r"st\.global", hopper["AdamW"]["ptx"]))
        == len(re.findall(WIDE_STORE, hopper["AdamW"]["ptx"]))
        == 6
    )
