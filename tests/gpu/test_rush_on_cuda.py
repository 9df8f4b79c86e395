"""The rush's setups on a GPU: every variant walks the curve of the plain one, captured and compiled steps included."""

import dataclasses
import time

import pytest
import torch
from llama_cases import loss_curve

from helpers.lab import compare
from helpers.lab.memory import free_memory
from helpers.lab.timing import queue_ahead, relative_error
from helpers.models.llama import eager_attention
from helpers.rush import Setup, build_trainer, climb, measurement, run
from helpers.rush.measurement import text_tokens
from helpers.rush.trainer import attention
from helpers.training.trainer import WARM_UP

TINY = Setup(model="tiny", sequence=128)
AMP = dataclasses.replace(TINY, precision="amp-bf16", attention="flash", optimizer="fused")
COMPILED = dataclasses.replace(AMP, compile="default", head="chunked")
STEPS = 8  # a graph is captured in the fourth


@pytest.fixture(scope="module")
def reference():
    return loss_curve(TINY, STEPS)


def here(setup):
    """The setup, or a skip with the reason why this machine can't run it."""
    if reason := setup.missing_because(torch.device("cuda")):
        pytest.skip(reason)
    return setup


@pytest.mark.parametrize(
    "changes",
    [
        {"attention": "cudnn"},
        {"attention": "math"},
        {"norm": "torch"},
        {"norm": "triton"},
        {"norm": "triton residual"},
        {"head": "chunked"},
        {"head": "torch"},
        {"optimizer": "for-loop"},
        {"optimizer": "foreach"},
        {"optimizer": "8-bit"},
        {"optimizer": "in backward"},
        {"mlp": "level 0"},
        {"mlp": "level 2"},
        {"fused": True},
        {"residual": "bf16"},
        {"precision": "bf16"},
        {"precision": "amp-fp16", "attention": "math"},
        {"float8": "tensorwise"},
        {"float8": "rowwise"},
        {"checkpointing": "full"},
        {"checkpointing": "selective"},
    ],
    ids=str,
)
@pytest.mark.parametrize("graph", [False, True], ids=["", "graph"])
def test_every_variant_walks_the_plain_curve_captured_or_not(changes, graph, reference):
    setup = here(dataclasses.replace(AMP, **changes, cuda_graph=graph))
    tolerance = 4 / 32 if setup.head == "torch" else 2e-2
    assert loss_curve(setup, STEPS) == pytest.approx(reference, abs=tolerance)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"head": "full"},
        {"cuda_graph": True},
        {"attention": "cudnn", "residual": "bf16", "fused": True},
        {"checkpointing": "selective"},
        {"checkpointing": "full", "cuda_graph": True},
        {"checkpointing": "full", "cuda_graph": True, "attention": "cudnn"},
        {"checkpointing": "memory budget"},
        {"float8": "tensorwise", "cuda_graph": True},
        {"float8": "rowwise", "cuda_graph": True},
        {"norm": "triton"},
        {"norm": "triton residual", "residual": "bf16", "cuda_graph": True},
        {"optimizer": "in backward", "cuda_graph": True},
        {"mlp": "level 2", "cuda_graph": True},
        {"optimizer": "8-bit", "cuda_graph": True},
    ],
    ids=str,
)
def test_compiled_steps_walk_the_plain_curve(changes, reference):
    setup = here(dataclasses.replace(COMPILED, **changes))
    assert loss_curve(setup, STEPS) == pytest.approx(reference, abs=2e-2)


@pytest.mark.alone
def test_the_last_step_of_the_ladder_that_the_others_stand_on_gives_a_row():
    setup = climb(TINY)["batch 8"].possible(torch.device("cuda"))
    row = run(dataclasses.replace(setup, compile="default", batch=4), steps=20)
    assert row["n"] == 20
    assert 0 < row["matmul_share"] < 1, row
    assert row["compile_s"] > row["step_ms"] / 1e3


def test_a_row_takes_turns_with_its_baseline_unless_memory_is_short(monkeypatch):
    setup = here(dataclasses.replace(AMP, cuda_graph=True))
    row = run(dataclasses.replace(setup, batch=2), loss_steps=4, baseline=setup, seconds=2.0)
    assert row["pairs"] >= 4 and row["n"] >= row["pairs"] and row["baseline_ms"] > 0
    monkeypatch.setattr(measurement, "ROOM", 0.0)
    row = run(setup, loss_steps=4, steps=5, baseline=AMP, seconds=2.0)
    assert "ratio" not in row and row["n"] == 5
    assert row["unpaired"].startswith("both would take ")


def test_a_captured_step_reads_the_tokens_it_is_given():
    setup = here(dataclasses.replace(AMP, cuda_graph=True, learning_rate=1e-12))
    trainer, batches = build_trainer(setup), text_tokens(setup, 2)
    for _ in range(5):
        trainer.step(batches[0])
    first, second = float(trainer.step(batches[0])), float(trainer.step(batches[1]))
    expected = [float(trainer.loss(tokens)[0]) for tokens in batches]
    assert [first, second] == pytest.approx(expected, abs=1e-3)
    assert first != second


@pytest.mark.parametrize("backend", ["math", "flash", "cudnn"])
def test_attention_equals_the_eager_one(backend):
    here(dataclasses.replace(AMP, attention=backend))
    q, k, v = (torch.randn(2, 257, n, 64, device="cuda").transpose(1, 2) for n in (8, 2, 2))
    upstream = torch.randn_like(q)

    def gradients(attend, dtype):
        inputs = [tensor.to(dtype).detach().requires_grad_() for tensor in (q, k, v)]
        out = attend(*inputs)
        return out, *torch.autograd.grad(out, inputs, upstream.to(dtype))

    expected = gradients(eager_attention, torch.float32)
    actual = gradients(attention(backend), torch.bfloat16)
    assert max(relative_error(ours, true) for ours, true in zip(actual, expected, strict=True)) < 1e-2


def test_steps_that_warm_up_share_the_memory_that_they_free():
    setup = here(dataclasses.replace(AMP, cuda_graph=True))
    trainer, tokens = build_trainer(setup), text_tokens(setup, 1)[0]
    reserved = []
    for _ in range(WARM_UP):
        trainer.step(tokens)
        reserved.append(torch.cuda.memory_reserved())
    assert reserved[1:] == reserved[1:2] * (WARM_UP - 1)  # the first makes the optimizer's state, too


def test_a_peak_counts_nothing_that_was_there_before():
    run(here(AMP), steps=2, loss_steps=2)  # what cuBLAS works in is there from now on
    alone = run(AMP, steps=2, loss_steps=2)["peak_gib"]
    there = torch.empty(2**30, dtype=torch.uint8, device="cuda")
    second_peak = run(AMP, steps=2, loss_steps=2)["peak_gib"]
    assert there.nbytes == 2**30
    assert second_peak == pytest.approx(alone, rel=0.02)


def test_what_cublas_works_in_is_given_back():
    free_memory()
    before = torch.cuda.memory_allocated()
    a = torch.randn(512, 512, device="cuda")
    torch.mm(a, a)
    del a
    free_memory()
    assert torch.cuda.memory_allocated() == before


def test_what_the_host_queued_ahead_is_timed_without_its_gaps():
    x = torch.randn(2**16, device="cuda")

    def slowly_launched():
        x.mul(2)
        time.sleep(3e-4)
        x.mul(2)

    with_gaps = compare({"way": slowly_launched}, check=False).timing("way").median_ms
    without = compare({"way": slowly_launched}, check=False, before=queue_ahead).timing("way").median_ms
    assert with_gaps > 0.3
    assert without < 0.1
