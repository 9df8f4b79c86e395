"""Where a step's memory goes: parts, the largest batch, and switches, beside measured peaks."""

import sys
from dataclasses import replace
from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from helpers import book
from helpers.fit import Plan, count, fit, rank_memory
from helpers.fit.ledger import Peak
from helpers.fit.plan import largest_batch, peak
from helpers.lab import peak_memory
from helpers.lab.memory import GIB
from helpers.rush import CPU_LADDER, Setup
from helpers.rush.setup import climb
from helpers.rush.trainer import build_trainer

TINY = Plan(model="tiny", sequence=64, batch=8)
MANY = replace(TINY, strategy="zero3", ranks=4)


@pytest.mark.parametrize(("plan", "room"), [(TINY, 20.0), (TINY, 1.0), (replace(MANY, strategy="ddp"), 3.7)])
def test_the_parts_add_up_and_the_largest_batch_fits_and_one_more_does_not(plan, room):
    limit = room * peak(replace(plan, batch=plan.ranks)).bytes
    largest = largest_batch(plan, limit)
    fitting = peak(replace(plan, batch=largest))
    assert sum(fitting.parts.values()) == fitting.bytes <= limit
    assert peak(replace(plan, batch=largest + plan.ranks)).bytes > limit


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 10**6), st.integers(1, 10**4)), min_size=1, max_size=4),
    st.integers(0, 10**9),
    st.sampled_from([1, 3]),
)
def test_the_largest_batch_of_a_peak_that_is_a_maximum_of_lines_is_found_in_few_counts(lines, limit, ranks):
    plan, batches = replace(TINY, batch=ranks, ranks=ranks), []

    def made_up(plan):
        batches.append(plan.batch)
        size = max(base + slope * plan.batch // ranks for base, slope in lines)
        return Peak(size, "backward", {})

    with mock.patch.object(sys.modules[largest_batch.__module__], "peak", made_up):
        largest = largest_batch(plan, limit)
    most = min(((limit - base) // slope for base, slope in lines), default=0)
    assert largest == ranks * max(most, 0)
    assert len(set(batches)) <= 60


def trained_gib(plan: Plan) -> float:
    """The measured peak of a step on one device; that of a simulated rank is counted."""
    if plan.strategy != "single":
        return rank_memory(plan.job, plan.ranks, count=True)
    trainer, tokens = build_trainer(plan.setup, torch.device("cpu")), torch.zeros(plan.batch, plan.sequence + 1).long()
    trainer.step(tokens)
    state = [tensor for state in trainer.optimizer.state.values() for tensor in state.values()]
    rest = sum(tensor.nbytes for tensor in [*trainer.model.parameters(), *trainer.model.buffers(), *state])
    return (rest + peak_memory(lambda: trainer.step(tokens)).peak_bytes) / GIB


@pytest.mark.long
def test_a_switch_that_is_said_to_make_a_step_fit_does():
    plan = replace(TINY, precision="fp32")
    limit = 0.8 * peak(plan).bytes / GIB
    result = fit(plan, limit)
    fitting = [replace(plan, **switch["change"]) for switch in result["switches"] if switch["fits"]]
    assert trained_gib(plan) > limit and not result["fits"] and fitting
    for switched in fitting:
        assert trained_gib(switched) <= 1.01 * limit


@pytest.mark.long
def test_forks_count_what_one_process_counts():
    assert fit(MANY, 0.01, forks=2) == fit(MANY, 0.01)


def added(setup: Setup) -> int:
    """What a step allocates on top of what stays between steps: a CPU's measured peak."""
    counted = count(setup)
    return counted.bytes - counted.at_rest


LADDER = climb(Setup(model="tiny", sequence=256), "cpu")


@pytest.mark.parametrize("step", ["no optimisation", "FlashAttention", "chunked cross-entropy", "bf16 weights"])
def test_a_step_of_the_ladder_needs_what_is_counted(step):
    setup = replace(LADDER[step], compile="none")
    trainer, tokens = build_trainer(setup, torch.device("cpu")), torch.zeros(setup.batch, 257, dtype=torch.long)
    trainer.step(tokens)
    assert added(setup) == pytest.approx(peak_memory(lambda: trainer.step(tokens)).peak_bytes, rel=0.05)


@pytest.mark.parametrize("change", [{"precision": "fp32"}, {"precision": "bf16"}, {"head": "chunked"}])
def test_the_two_gradients_of_a_tied_embedding_are_added_as_in_training(change):
    setup = Plan(model="tiny", batch=1, sequence=2, checkpointing="full", **change).setup  # gradients are the peak
    trainer, tokens = build_trainer(setup, torch.device("cpu")), torch.zeros(1, 3, dtype=torch.long)
    trainer.step(tokens)
    assert added(setup) == pytest.approx(peak_memory(lambda: trainer.step(tokens)).peak_bytes, rel=0.02)


CLIMBED = [machine for machine in book.devices(cpu=True) if len(book.read(machine, "rush", "ladder"))]


@pytest.mark.parametrize("machine", CLIMBED)
def test_recorded_peaks_of_the_uncompiled_ladder_are_counted_within_5_percent(machine):
    rows = book.read(machine, "rush", "ladder")
    rows = rows[(rows["model"] == "llama-60m") & (rows["status"] == "ok")]
    for step in ("no optimisation", "fused AdamW", "FlashAttention"):
        for measured in rows.loc[rows["step"] == step, "peak_gib"]:
            assert added(CPU_LADDER[step]) / GIB == pytest.approx(measured, rel=0.05)


COMPILED = ("compile", "chunked cross-entropy", "SwiGLU level 2", "bf16 weights", "fused projections", "batch 2")


@pytest.mark.long
@pytest.mark.parametrize("step", COMPILED)
@pytest.mark.parametrize("machine", CLIMBED)
def test_recorded_peaks_of_its_compiled_rungs_too_where_another_compiler_fuses(machine, step):
    rows = book.read(machine, "rush", "ladder")
    rows = rows[(rows["model"] == "llama-60m") & (rows["status"] == "ok")]
    for measured in rows.loc[rows["step"] == step, "peak_gib"]:
        assert added(CPU_LADDER[step]) / GIB == pytest.approx(measured, rel=0.06)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"model": "gpt"}, "valid: 'tiny', "),
        ({"strategy": "zero9"}, "valid: 'single', 'ddp', 'zero2', 'zero3'"),
        ({"ranks": 8}, "strategy 'single' has one rank, not 8"),
        ({"strategy": "ddp", "ranks": 3}, "batch is 8; it must be a multiple of 3"),
        ({"strategy": "ddp", "head": "chunked"}, "valid: 'full'"),
        ({"model": "LlamaForCausalLM", "strategy": "ddp"}, "strategy is 'ddp'; valid: 'single'"),
        ({"memory_gib": float("inf")}, "at most"),
    ],
)
def test_a_wrong_plan_is_named(change, said):
    memory_gib = change.pop("memory_gib", 1.0)
    with pytest.raises(ValueError, match=said):
        fit(Plan(**change), memory_gib)
