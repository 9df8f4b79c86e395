"""The kernels compile for a Hopper GPU, which needs no GPU: what they read at once, and that no register spills."""

import re

import pytest

pytest.importorskip("triton")

from interpreted import compile_for_hopper

from helpers.rush.kernels import adamw, cross_entropy, launch, norms

HALF, FULL, LONG, INT = "*bf16", "*fp32", "*i64", "i32"
REGISTERS, SHARED = 65536, 227 * 1024  # of a multiprocessor
WIDE_LOAD, WIDE_STORE = r"ld\.global\S*\.v4\.b32", r"st\.global\S*\.v4\.b32"
AHEAD = r"cp\.async\.cg\.shared\.global \[.*\], \[.*\], 0x10"  # to shared memory, 16 bytes for each thread
BACKWARD = [("backward", 128, False), ("backward", 2048, False), ("backward", 2048, True), ("backward", 8192, True)]
FORWARD = [("forward", 2048, False), ("forward", 2048, True)]


def job(module, kernel, types, constants, warps, **options):
    return f"helpers.rush.kernels.{module}", kernel, types, constants, {"num_warps": warps, **options}


def norm(direction, width, centred):
    """LayerNorm if `centred`, else RMSNorm."""
    rows, block, warps = norms.tile(width, 16 if direction == "forward" else 8)
    mean, bias = (FULL, HALF) if centred else (None, None)
    shape = {"WIDTH": width, "ROWS": rows, "BLOCK": block}
    types = {"x_at": HALF, "weight_at": HALF, "mean_at": mean, "rstd_at": FULL, "count": INT, "x_step": INT}
    if direction == "forward":
        types |= {"bias_at": bias, "y_at": HALF}
        return job("norms", "_forward_kernel", types | {"eps": "fp32"}, shape | {"CENTRED": centred}, warps)
    types |= {"dy_at": HALF, "dx_at": HALF, "shares_at": FULL, "dy_step": INT}
    constants = shape | {"WEIGHT": True, "BIAS": centred, "STAGES": launch.stages(4 * rows * block)}
    return job("norms", "_backward_kernel", types, constants, warps, maxnreg=norms.REGISTERS)


def rope():
    steps = [f"{x}_{of}" for x in ("q", "k", "q_out", "k_out") for of in ("batch", "token", "head")]
    types = dict.fromkeys(("q_at", "k_at", "q_out_at", "k_out_at"), HALF) | {"cos_at": FULL, "sin_at": FULL}
    types |= dict.fromkeys([*steps, "cos_batch", "cos_token", "tokens"], INT)
    heads = {"HEADS_Q": 32, "HEADS_K": 8, "HALF": 32, "BLOCK_Q": 32, "BLOCK_K": 8, "BLOCK": 32, "INVERSE": False}
    return job("rope", "_rotate_kernel", types, heads, 1)


def adamw_update(lr_on_device):
    types = {"table_at": LONG, "chunks_at": "*i32", "factors_at": FULL, "grad_scale_at": FULL, "found_inf_at": FULL}
    types |= dict.fromkeys(["beta1", "beta2", "rest1", "rest2", "eps", "weight_decay"], "fp32")
    types["lr"] = FULL if lr_on_device else "fp32"
    constants = {"COLUMNS": adamw.COLUMNS, "CHUNK": adamw.CHUNK, "VECTOR": True}
    constants["LR_ON_DEVICE"] = lr_on_device
    return job("adamw", "_update_kernel", types, constants, 4)


def losses():
    block = cross_entropy.BLOCK
    types = {"logits_at": HALF, "target_at": LONG, "losses_at": FULL, "step": INT, "ignored": INT}
    constants = {"V": 128256, "BLOCK": block, "STAGES": launch.stages(2 * block)}
    return job("cross_entropy", "_loss_kernel", types, constants, block // 512)


def small_ones():
    types = {"table_at": LONG, "factors_at": FULL, "lr": FULL, "found_inf_at": FULL, "count": INT}
    types |= {"log2_beta1": "fp32", "log2_beta2": "fp32"}
    constants = {"LR_ON_DEVICE": True, "COLUMNS": adamw.COLUMNS, "BLOCK": adamw.AT_A_TIME}
    advance = job("adamw", "_advance_kernel", types, constants, 4)
    constants = {"WIDTH": 4096, "ROWS": norms.SHARES, "COLUMNS": norms.COLUMNS}
    add_up = job("norms", "_sum_kernel", {"shares_at": FULL, "sums_at": HALF, "count": INT}, constants, 4)
    return {"advance": advance, "add up": add_up}


@pytest.fixture(scope="module")
def hopper():
    jobs = {case: norm(*case) for case in FORWARD + BACKWARD}
    jobs |= {"AdamW": adamw_update(False), "AdamW, rate on the device": adamw_update(True)}
    jobs |= {"rope": rope(), "cross-entropy": losses()} | small_ones()
    return dict(zip(jobs, compile_for_hopper(list(jobs.values())), strict=True))


def test_nothing_spills(hopper):
    assert {name: usage["spilled"] for name, usage in hopper.items() if usage["spilled"]} == {}


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
    warps = norms.tile(case[1], 8)[2]
    programs = norms.RESIDENT // (32 * warps)
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
