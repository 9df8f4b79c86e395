"""Training by a setup: every step of the ladder runs on the tiny model or says why not, and computes the same."""

import dataclasses
import math
import re
import statistics

import pytest
import torch
from llama_cases import loss_curve
from torch import nn
from torch.utils import flop_counter

from helpers.chapters.amp.scaler_step import operations
from helpers.chapters.rush import transformers_llama as peers
from helpers.lab import peak_memory
from helpers.lab.cards import likely
from helpers.lab.ceilings import ProductRate
from helpers.lab.machine import installed, missing_because
from helpers.lab.timing import Timing
from helpers.rush import Setup, build_trainer, climb, measurement, run, trainer
from helpers.rush.measurement import fixed_tokens, text_tokens
from helpers.rush.rates import flops_per_token, parameters, shares
from helpers.rush.setup import LADDERS

CPU = torch.device("cpu")
TINY = Setup(model="tiny", sequence=16)
TIMES = ["tokens_per_s", "step_ms", "p20_ms", "p80_ms", "n"]
PRODUCT = [f"product_{name}" for name in ("library", "tflops", "p20_tflops", "clock_mhz", "power_w")]
ROW = [*TIMES, "peak_gib", "mfu", *PRODUCT, "matmul_share", "compile_s", "loss", "text"]


def tiny(**changes):
    return dataclasses.replace(TINY, **changes)


@pytest.fixture(scope="module")
def reference():
    return loss_curve(TINY, 6)


@pytest.fixture
def traced_only(monkeypatch):
    """torch.compile traces, and runs what it traced as it is: writing code for a CPU takes most of a minute."""
    compile = torch.compile
    monkeypatch.setattr(torch, "compile", lambda fn, dynamic, **_: compile(fn, backend="eager", dynamic=dynamic))


SETUPS = {(kind, name): setup for kind in LADDERS for name, setup in climb(TINY, kind).items()}
IMPOSSIBLE = {step: setup for step, setup in SETUPS.items() if setup.missing_because(CPU)}


def on_cpu(kind, name):
    """The nearest setup that a CPU can run in little time; only the steps named so are compiled."""
    possible = SETUPS[kind, name].possible(CPU)
    small = dataclasses.replace(possible, batch=min(possible.batch, 2))
    return small if name == "compile" else dataclasses.replace(small, compile="none")


@pytest.mark.parametrize(
    "setup", dict.fromkeys(on_cpu(*step) for step in SETUPS), ids=lambda setup: str(setup.differs(TINY))
)
def test_each_step_of_the_ladders_walks_the_plain_curve(setup, reference, traced_only):
    # torch's own chunked head adds the loss up in bf16, whose steps are 1/32 here
    assert loss_curve(setup, 6) == pytest.approx(reference, abs=4 / 32 if setup.head == "torch" else 5e-3)


def test_a_step_that_cannot_run_here_says_why():
    for setup in IMPOSSIBLE.values():
        with pytest.raises(ValueError, match=re.escape(setup.missing_because(CPU))):
            build_trainer(setup)


def test_a_row_has_what_the_tables_need():
    row = run(tiny(batch=2), steps=4, warmup=1, loss_steps=5)
    assert list(row) == ROW
    assert row["n"] == 4  # of which three are of the loss curve
    assert "text" in row["text"]
    assert row["p20_ms"] <= row["step_ms"] <= row["p80_ms"]
    assert row["tokens_per_s"] == pytest.approx(2 * 16 / row["step_ms"] * 1e3)
    assert row["peak_gib"] > 0
    assert row["mfu"] is None or 0 < row["mfu"] < 1
    assert 0 < row["matmul_share"] < 1


def test_of_steps_that_take_long_fewer_are_timed_and_the_row_says_how_many(monkeypatch):
    assert run(TINY, loss_steps=2)["n"] == 20
    monkeypatch.setattr(measurement, "LONGEST_S", 0.0)
    assert run(TINY, loss_steps=2)["n"] == 3
    assert run(TINY, loss_steps=2, steps=2)["n"] == 2
    assert run(TINY, loss_steps=10)["n"] == 8  # those of the loss curve after the first two


def test_two_setups_in_turns_are_compared_by_token(monkeypatch):
    monkeypatch.setattr(measurement, "TURN_S", 0.005)
    step_ms, row = measurement.in_turns(TINY, tiny(batch=4), 5.0)
    assert 0.5 < row["ratio"] * row["baseline_ms"] / statistics.median(step_ms) < 2  # by step it would be 4
    assert row["low"] < row["ratio"] < row["high"] and row["pairs"] == measurement.ROUNDS
    assert row["baseline_ms"] > 2 * statistics.median(measurement.in_turns(TINY, TINY, 5.0)[0])


def test_the_same_setup_gives_the_same_curve_and_another_seed_another(reference):
    assert loss_curve(TINY, 6) == reference
    assert loss_curve(tiny(seed=1), 6) != reference


def test_weights_do_not_depend_on_what_making_the_parts_draws(monkeypatch):
    expected = trainer.build_model(TINY, CPU).weights()
    reset = nn.Linear.reset_parameters
    monkeypatch.setattr(nn.Linear, "reset_parameters", lambda linear: (reset(linear), torch.rand(7)))
    actual = trainer.build_model(TINY, CPU).weights()
    assert all(torch.equal(actual[name], weight) for name, weight in expected.items())


def test_the_first_loss_is_the_one_of_a_row_and_depends_on_the_seed():
    setup = tiny(batch=2, head="chunked")
    row = run(setup, steps=4, loss_steps=measurement.ON_CPU_LOSS_STEPS)
    assert measurement.first_loss(setup, seed=0) == pytest.approx(row["loss"], abs=1e-4)
    assert abs(measurement.first_loss(setup, seed=1) - row["loss"]) > 1e-3


def test_the_curve_does_not_depend_on_the_batch(reference):
    assert loss_curve(tiny(batch=3), 6) == pytest.approx(reference, abs=1e-4)


# What the ladders' steps don't try, and what they try only beside changes that round.
EXACT = [
    {"attention": "math"},
    {"attention": "blocked", "norm": "torch", "head": "chunked"},
    {"mlp": "level 1", "optimizer": "foreach"},
    {"mlp": "level 2", "fused": True},
    {"optimizer": "in backward", "head": "chunked", "checkpointing": "full"},
    {"checkpointing": "full"},
    {"checkpointing": "selective", "attention": "flash"},
]
ROUNDED = [
    {"mlp": "level 3"},
    {"precision": "amp-fp16"},
    {"precision": "bf16", "head": "chunked", "checkpointing": "selective"},
]


@pytest.mark.parametrize(("changes", "tolerance"), [(c, 1e-4) for c in EXACT] + [(c, 2e-2) for c in ROUNDED], ids=str)
def test_every_variant_walks_the_fp32_curve_and_what_rounds_stays_near_it(changes, tolerance, reference):
    assert loss_curve(tiny(**changes), 6) == pytest.approx(reference, abs=tolerance)


def test_fp16_trains_under_a_scale_that_backs_off():
    one = build_trainer(tiny(precision="amp-fp16"))
    one.scaler.set_backoff_factor(0.25)
    before = one.model.head.weight.detach().clone()
    one.scaler.load_state_dict(one.scaler.state_dict() | {"scale": 2.0**24})
    one.step(text_tokens(TINY, 1)[0])  # too large a scale: the step is skipped
    assert one.scaler.get_scale() == 2.0**22
    assert torch.equal(one.model.head.weight, before)


def test_selective_checkpointing_repeats_no_product_and_full_repeats_them():
    products, peaks = {}, {}
    for checkpointing in ("none", "selective", "full"):
        setup = tiny(checkpointing=checkpointing, sequence=256, attention="flash", head="chunked")
        one = build_trainer(setup)
        tokens = text_tokens(setup, 1)[0]
        names = operations(lambda t=one, x=tokens: t.loss(x)[0].backward())
        products[checkpointing] = sum(name in ("aten::mm", "aten::bmm", "aten::addmm") for name in names)
        peaks[checkpointing] = peak_memory(lambda t=one, x=tokens: t.loss(x)[0].backward()).peak_bytes
    assert products["selective"] == products["none"]
    # Of a block's seven products the last needn't be repeated: nothing's gradient depends on what it returns.
    assert products["none"] + 2 * 6 <= products["full"] <= products["none"] + 2 * 7
    assert peaks["full"] < peaks["selective"] < peaks["none"]


def test_tokens_are_of_full_length_and_the_same_everywhere():
    setup = tiny(batch=3)
    first, second = text_tokens(setup, 2)
    assert first.shape == (3, 17)
    assert not torch.equal(first, second)
    assert torch.equal(first, text_tokens(setup, 2)[0])
    fixed = fixed_tokens(setup)
    rounds = [next(fixed) for _ in range(5)]
    assert torch.equal(rounds[0], rounds[4])
    assert not torch.equal(rounds[0], rounds[1])
    assert (rounds[0] == rounds[0][:1]).all()


def test_operations_are_counted_by_the_convention():
    assert parameters("llama-3.2-1b") == 1_235_814_400  # the tied embedding once
    actual = [flops_per_token("llama-3.2-1b", length) / 1e9 for length in (2048, 4096, 8192)]
    assert actual == pytest.approx([8.22, 9.03, 10.64], abs=0.005)


@pytest.mark.parametrize(
    ("device", "card"),
    [("NVIDIA A100-PG509-200", "a100_80gb"), ("Tesla V100-DGXS-32GB", "v100_32gb"), ("NVIDIA RTX A1000", None)],
)
def test_a_card_is_found_by_the_words_of_a_devices_name(device, card):
    assert getattr(likely(device), "gpu", None) == card


def test_mfu_is_against_the_vendors_peak(monkeypatch):
    monkeypatch.setattr("helpers.rush.rates.device_name", lambda: "NVIDIA H200")
    rate = {"bfloat16": 780.0, "float8_e4m3fn": 1400.0}
    monkeypatch.setattr("helpers.rush.rates.product_rate", lambda of: ProductRate("BLAS", rate[of], Timing(1, 1, 1, 1)))
    actual = shares(Setup(precision="bf16"), 72_200)
    assert actual["mfu"] == pytest.approx(0.600, abs=1e-3)
    assert actual["matmul_share"] == pytest.approx(actual["mfu"] * 989 / 780)
    float8 = Setup(precision="bf16", float8="tensorwise")
    assert shares(float8, 72_200)["matmul_share"] == actual["matmul_share"]  # a CPU emulates it
    monkeypatch.setattr("helpers.rush.rates.device", lambda: torch.device("cuda"))
    in_float8 = shares(float8, 72_200)
    assert actual["matmul_share"] * 780 / 1400 < in_float8["matmul_share"] < actual["matmul_share"]
    monkeypatch.setattr("helpers.rush.rates.device_name", lambda: "CPU of some kind")
    assert shares(Setup(precision="bf16"), 72_200)["mfu"] is None


@pytest.mark.skipif(installed("transformers") is None, reason="needs transformers")
@pytest.mark.parametrize("variant", peers.VARIANTS)
def test_a_peer_walks_our_curve_or_says_why_not(variant, reference):
    if reason := missing_because(*peers.needs(variant)):
        with pytest.raises(ValueError, match=reason):
            peers.training_step(variant, TINY)
    elif "compile" not in variant:
        step, tokens = peers.training_step(variant, TINY), fixed_tokens(TINY)
        assert [float(step(next(tokens))) for _ in range(6)] == pytest.approx(reference, abs=1e-4)


def test_under_a_memory_budget_grouped_heads_are_counted_as_if_they_were_repeated(monkeypatch):
    def of_211(query, key, value):
        assert query[:2] == key[:2] == value[:2]
        return math.prod(query) * key[2] * 2

    monkeypatch.setattr(flop_counter, "sdpa_flop_count", of_211)
    q, k = torch.zeros(1, 4, 8, 16), torch.zeros(1, 2, 8, 16)
    count = flop_counter.flop_registry[torch.ops.aten._scaled_dot_product_flash_attention]
    with trainer.compiler_budget(tiny(compile="default", checkpointing="memory budget")):
        assert count(q, k, k, out_val=q) == count(q, q, q, out_val=q)
    assert flop_counter.sdpa_flop_count is of_211
