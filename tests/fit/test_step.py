"""A step of a setup on a GPU that isn't there: beside the recorded ladder, and its counts beside a real step's."""

from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.profiler import ProfilerActivity, profile

from helpers import book
from helpers.chapters.rush.setups import BEFORE_LENGTHS
from helpers.fit import count, step_time
from helpers.fit.fused import Compiler, _over_rows
from helpers.fit.meter import Kernel, Meter
from helpers.fit.step import EXPONENTIALS, OPERATOR_LAUNCHES, SHARES, Count, count_step, counted, seconds
from helpers.kernels.swaps import COMPILED as COMPILED_NORM
from helpers.kernels.swaps import WRITTEN_OUT
from helpers.lab.cards import LAUNCH_US, card
from helpers.lab.memory import GIB
from helpers.models.llama import eager_rms_norm
from helpers.rush import Setup, climb
from helpers.rush.trainer import build_trainer

H200 = card("h200")
LADDER, CHECKPOINTED = (book.read("nvidia-h200", "rush", name) for name in ("ladder", "checkpointing"))
TINY = Setup(model="tiny", sequence=64, batch=2, precision="amp-bf16", attention="flash", optimizer="fused")
ONE_LAYER = replace(TINY, layers=1)


@pytest.mark.long
@pytest.mark.parametrize("step", LADDER["step"])
def test_a_rung_of_the_recorded_ladder_is_predicted(step):
    row = LADDER.set_index("step").loc[step]
    setup = climb(Setup(model=row["model"], sequence=int(row["sequence"])))[step]
    within = 0.2 if setup.compile == "none" else 0.1
    assert step_time(setup, H200)["tokens_per_s"] == pytest.approx(row["tokens_per_s"], rel=within)
    assert count(setup).bytes / GIB == pytest.approx(row["peak_gib"], rel=0.05)


@pytest.mark.parametrize("row", CHECKPOINTED.to_dict("records"), ids=lambda row: row["checkpointing"])
def test_so_is_checkpointing_of_longer_sequences_which_no_constant_was_chosen_by(row):
    setup = climb(Setup(model=row["model"], sequence=int(row["sequence"])))[BEFORE_LENGTHS["cuda"]]
    setup = replace(setup, checkpointing=row["checkpointing"])
    assert step_time(setup, H200)["tokens_per_s"] == pytest.approx(row["tokens_per_s"], rel=0.1)
    assert count(setup).bytes / GIB == pytest.approx(row["peak_gib"], rel=0.02)


COMPILED = replace(TINY, compile="regional")


@pytest.mark.long
@pytest.mark.parametrize(
    ("setup", "change"),
    [
        (TINY, {"precision": "fp32"}),
        (replace(TINY, precision="fp32"), {"precision": "tf32"}),
        (TINY, {"optimizer": "for-loop"}),
        (TINY, {"attention": "eager"}),
        (TINY, {"attention": "cudnn"}),
        (TINY, {"compile": "regional"}),
        (COMPILED, {"residual": "bf16"}),
        (COMPILED, {"fused": True}),
        (COMPILED, {"head": "chunked"}),
        (COMPILED, {"cuda_graph": True}),
        (COMPILED, {"float8": "tensorwise"}),
        (COMPILED, {"checkpointing": "full"}),
        (COMPILED, {"batch": 4}),
    ],
)
def test_each_change_of_a_rung_changes_the_prediction(setup, change):
    assert step_time(setup, H200)["parts"] != step_time(replace(setup, **change), H200)["parts"]


def test_launches_and_the_optimizer_are_paid_for_once_a_step():
    small, large = (step_time(replace(COMPILED, batch=batch), H200)["parts"] for batch in (2, 4))
    assert small["optimizer"] == large["optimizer"] and large["products"] > small["products"]
    assert step_time(replace(COMPILED, cuda_graph=True), H200)["parts"]["launches"] == 0 < small["launches"]


def test_a_counted_steps_seconds_are_those_of_its_kernels_and_the_hosts_of_its_operators():
    kernels = [
        Kernel("product", bytes=1e6, flops=1e12, dtype=torch.bfloat16),
        Kernel("product", bytes=1e12, flops=1e6, dtype=torch.bfloat16),
        Kernel("attention", 0.0, 2e12, 3e10, torch.bfloat16),
        Kernel("eager", 5e9),
        Kernel("fused", 6e9),
        Kernel("optimizer", 7e9),
    ]
    step, rate, copied = Count([], kernels, 1000), 1e12 * H200.sustained("bf16"), 1e9 * H200.copy_gb_per_s
    products, exponentials = 2e12 / rate, EXPONENTIALS * 3e10 / 1e12 / H200.special_tops
    expected = {
        "products": 1e12 / rate + 1e12 / copied,
        "attention": products + exponentials,
        "memory": (5e9 / SHARES["eager"] + 6e9 / SHARES["fused"]) / copied,
        "optimizer": 7e9 / SHARES["optimizer"] / copied,
        "host": 1e-6 * LAUNCH_US * (1000 * OPERATOR_LAUNCHES + 1),
    }
    assert seconds(TINY, H200, step) == pytest.approx(expected)
    overlapping = seconds(replace(TINY, attention="cudnn"), H200, step)
    assert overlapping["attention"] == pytest.approx(max(products, exponentials))


def test_a_deep_steps_time_follows_from_two_and_three_layers_and_the_host_is_waited_for(monkeypatch):
    setup = replace(TINY, layers=10)
    moved = {layers: [Kernel("eager", bytes=1e9)] * layers for layers in (2, 3)}
    monkeypatch.setattr(f"{seconds.__module__}.BAND", (-0.2, 0.1))
    monkeypatch.setattr(f"{seconds.__module__}.counted", lambda _: {n: Count([], moved[n], 10**5 * n) for n in moved})
    memory, host = 10 * 1e9 / SHARES["eager"] / H200.copy_gb_per_s / 1e9, 1e6 * 1e-6 * LAUNCH_US * OPERATOR_LAUNCHES
    row, captured = step_time(setup, H200), step_time(replace(setup, cuda_graph=True), H200)
    assert row["parts"]["memory"] == captured["step_ms"] / 1e3 == pytest.approx(memory)
    assert row["parts"]["launches"] == pytest.approx(host - memory) and row["step_ms"] == pytest.approx(1e3 * host)
    assert row["tokens_per_s"] == pytest.approx(2 * 64 / host)
    assert [row["low"], row["high"]] == pytest.approx(row["tokens_per_s"] * np.exp([-0.2, 0.1]))


@pytest.mark.parametrize("backward", [False, True])
def test_attention_is_products_and_exponentials_of_the_causal_half(backward):
    with FakeTensorMode(), Meter() as meter:
        query, key, value = (torch.empty(2, 4, length, 16, requires_grad=True) for length in (32, 48, 48))
        result = torch.nn.functional.scaled_dot_product_attention(query, key, value)
        if backward:
            meter.kernels.clear()
            result.sum().backward()
    (kernel,) = (kernel for kernel in meter.kernels if kernel.kind == "attention")
    scores = 2 * 4 * 32 * 48 / 2
    assert kernel.exponentials == scores
    assert kernel.flops == (5 if backward else 2) * 2 * scores * 16


@pytest.mark.parametrize("optimizer", ["for-loop", "fused"])
def test_what_is_counted_is_what_torch_dispatches_in_a_real_step(optimizer):
    setup = replace(ONE_LAYER, optimizer=optimizer)
    counted_step = count_step(setup, FakeTensorMode(), Compiler())
    trainer, tokens = build_trainer(setup, torch.device("cpu")), torch.zeros(2, 65, dtype=torch.long)
    trainer.step(tokens)
    with Meter() as meter:
        trainer.step(tokens)
    assert len(counted_step.kernels) == len(meter.kernels)
    assert counted_step.operators == pytest.approx(meter.operators, abs=2)
    with profile(activities=[ProfilerActivity.CPU]) as profiled:
        trainer.step(tokens)
    calls = Counter(event.name for event in profiled.events())
    products = sum(kernel.kind == "product" for kernel in counted_step.kernels)
    assert products == calls["aten::mm"] + calls["aten::bmm"] == 3 * 8  # seven of the layer, and the head
    updates = sum(kernel.kind == "optimizer" for kernel in counted_step.kernels)
    assert updates >= 8 * 11 if optimizer == "for-loop" else updates == calls["aten::_fused_adamw_"] == 1


def test_shares_of_a_copys_rate_are_those_of_kernels_measured_alone():
    norms, adam = (book.read("nvidia-h200", "rush", table) for table in ("norms", "adam"))
    norms = norms[norms["kind"] == "rms"]
    compiled = norms.loc[norms["variant"] == COMPILED_NORM, "share_of_copy"]
    assert SHARES["fused"] == pytest.approx(compiled.median(), 0.01)
    shares = []
    for row in norms[norms["variant"] == WRITTEN_OUT].itertuples():
        moved = norm_bytes(int(row.rows), int(row.width))
        shares.append(moved / row.median_ms / 1e6 / H200.copy_gb_per_s)
    assert SHARES["eager"] == pytest.approx(np.median(shares), rel=0.03)
    fused = adam[(adam["million_parameters"] == 1000) & (adam["variant"] == "fused")].iloc[0]
    assert SHARES["optimizer"] == pytest.approx(fused["share_of_copy"], rel=0.01)


def norm_bytes(rows: int, width: int) -> float:
    """What the operators of a plain RMSNorm move, forward and backward, each with its own result."""
    with FakeTensorMode():
        x = torch.empty(rows, width, dtype=torch.bfloat16, requires_grad=True)
        weight = torch.empty(width, dtype=torch.bfloat16, requires_grad=True)
        with Meter() as meter:
            torch.autograd.grad(eager_rms_norm(x, weight, 1e-5), [x, weight], torch.empty_like(x))
    return sum(kernel.bytes for kernel in meter.kernels)


def test_a_compiler_fuses_and_stores_less():
    eager, compiled = (list(counted(setup).values())[-1] for setup in (TINY, COMPILED))
    moved = [sum(kernel.bytes for kernel in step.kernels if kernel.kind != "optimizer") for step in (eager, compiled)]
    flops = [sum(kernel.flops for kernel in step.kernels) for step in (eager, compiled)]
    assert len(compiled.kernels) < 0.6 * len(eager.kernels) and moved[1] < 0.7 * moved[0]
    assert flops[0] == pytest.approx(flops[1]) and compiled.operators < 0.3 * eager.operators
    assert count(COMPILED).bytes < count(TINY).bytes
    few, more = (len(step.peaks) for step in counted(replace(TINY, layers=4)).values())  # of two layers and of three
    assert more == few + 1


def test_an_optimizer_within_backward_moves_its_own_bytes_and_keeps_no_gradients():
    fake, compiler = FakeTensorMode(), Compiler()
    moved, kept = {}, {}
    for optimizer in ("fused", "in backward"):
        counted_step = count_step(replace(ONE_LAYER, optimizer=optimizer), fake, compiler)
        moved[optimizer] = sum(kernel.bytes for kernel in counted_step.kernels if kernel.kind == "optimizer")
        kept[optimizer] = counted_step.peaks[-1].parts.get("gradients", 0)
    assert moved["in backward"] == pytest.approx(moved["fused"], rel=0.01)
    assert kept["in backward"] == 0 < kept["fused"]


@pytest.mark.parametrize(
    ("reduce", "over_rows"),
    [
        (lambda x: x.sum(0), True),
        (lambda x: x.sum(), True),
        (lambda x: x.sum(-1), False),
        (lambda x: x.sum(-1, keepdim=True), False),
        (lambda x: x + 1, False),
    ],
)
def test_reductions_over_rows_are_told_from_those_within_a_row(reduce, over_rows):
    graph = make_fx(reduce, tracing_mode="fake")(torch.ones(4, 6)).graph
    assert [_over_rows(node) for node in graph.nodes if node.op == "call_function"][-1] == over_rows
