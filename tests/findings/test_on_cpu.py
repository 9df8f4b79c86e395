"""A diagnosis of a CPU: products in fp32, chains too large for the cache, gains that a CPU has not."""

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.profiler import profile, schedule

from helpers.findings.caveats import NOT_EXPLAINED
from helpers.findings.diagnose import diagnose
from helpers.findings.rules.unrecorded import ranked
from helpers.findings.trace_file import read_trace
from helpers.script import rates

EAGER = {"foreach": False, "lr": 1e-3}


def record(step, steps=3, detailed=True):
    """A profile of some calls; `detailed` with shapes and stacks."""
    plan = schedule(wait=0, warmup=1, active=steps, repeat=1)
    with profile(record_shapes=detailed, with_stack=detailed, schedule=plan) as taken:
        for _ in range(steps + 1):
            step()
            taken.step()
    return taken


def gains(step):
    return {f.finding: f for f in diagnose(record(step), least=0.0).findings}


@pytest.fixture
def fast_bf16(monkeypatch):
    """A CPU that multiplies bf16 numbers four times as fast."""
    monkeypatch.setattr("helpers.findings.trace_file.speedups", lambda: {"384": 4.0, "convolution": 4.0})


def training(model, x, precision=torch.float32):
    def step():
        with torch.autocast("cpu", precision, enabled=precision != torch.float32):
            loss = model(x).float().square().mean()
        loss.backward()

    return step


def test_fp32_products_gain_what_bf16_is_faster_by_forward_and_backward(fast_bf16):
    linear = nn.Linear(128, 128, bias=False)
    trace = read_trace(record(training(linear, torch.randn(512, 128, requires_grad=True))))
    [finding] = [f for f in diagnose(trace, least=0.0).findings if f.finding == "fp32 products"]
    products = sum(op.us for op in trace.ops if op.name == "aten::mm")
    assert finding.option and finding.evidence.startswith("3 products a step")
    assert finding.gain_ms == pytest.approx(0.75 * products / 3 / 1e3, rel=1e-3)


def test_what_only_shapes_show_counts_as_a_share_of_its_part_where_costs_are_recorded_apart(fast_bf16):
    step = training(nn.Linear(384, 384), torch.randn(2048, 384))
    costs, places = record(step, detailed=False), record(step)
    both, alone = diagnose(costs, places=places, least=0.0), diagnose(places, least=0.0)
    [finding], [other] = ([f for f in d.findings if f.finding == "fp32 products"] for d in (both, alone))
    assert finding.gain_share / both.host[finding.part] == pytest.approx(other.gain_share / alone.host[other.part])
    assert finding.gain_ms == pytest.approx(finding.gain_share * both.step_ms)
    assert any(note.kind == NOT_EXPLAINED and "aten::mm" in note.text for note in diagnose(costs).notes)
    assert not any(note.kind == NOT_EXPLAINED and "aten::mm" in note.text for note in both.notes)


def test_products_in_bf16_and_narrow_ones_gain_nothing(fast_bf16):
    assert "fp32 products" not in gains(training(nn.Linear(128, 128), torch.randn(64, 128), torch.bfloat16))
    assert "fp32 products" not in gains(training(nn.Linear(128, 3), torch.randn(64, 128)))


def test_products_that_are_slower_in_bf16_gain_what_fp32_is_faster_by(monkeypatch):
    monkeypatch.setattr("helpers.findings.trace_file.speedups", lambda: {"384": 0.25})
    linear, x = nn.Linear(128, 128, bias=False), torch.randn(512, 128)
    trace = read_trace(record(training(linear, x, torch.bfloat16)))
    [finding] = [f for f in diagnose(trace, least=0.0).findings if f.finding == "slow 16-bit products"]
    products = sum(op.us for op in trace.ops if op.name == "aten::mm")
    assert finding.gain_ms == pytest.approx(0.75 * products / 3 / 1e3, rel=1e-3)
    assert "4× as long as in fp32" in finding.evidence
    assert "slow 16-bit products" not in gains(training(linear, x))


def test_a_narrow_product_gains_less_than_a_cube_of_as_many_operations(monkeypatch):
    rates = {"16": 1.0, "64": 2.0, "256": 4.0}
    monkeypatch.setattr("helpers.findings.trace_file.speedups", lambda: rates)
    shares = []
    for width, batch in ((128, 128), (32, 128 * 16)):
        trace = read_trace(record(training(nn.Linear(width, width, bias=False), torch.randn(batch, width))))
        [finding] = [f for f in diagnose(trace, least=0.0).findings if f.finding == "fp32 products"]
        products = sum(op.us for op in trace.ops if op.name == "aten::mm")
        shares.append(3e3 * finding.gain_ms / products)
    assert shares[0] > shares[1] > 0


def test_products_in_fp64_gain_what_a_register_holds_more_in_fp32():
    found = gains(training(nn.Linear(512, 512).double(), torch.randn(256, 512, dtype=torch.float64)))["fp64 products"]
    assert 0.05 < found.gain_share <= 0.5 and "fp32" in found.advice
    assert "fp64 products" not in gains(training(nn.Linear(512, 512), torch.randn(256, 512)))


@pytest.mark.parametrize(("speedup", "saved"), [(4.0, 0.75), (1.5, 0.5)])
def test_of_products_in_fp64_what_fp32_is_measured_to_save_and_half_at_least(monkeypatch, speedup, saved):
    monkeypatch.setattr("helpers.findings.trace_file.speedups", lambda: {rates.FP64: speedup})
    linear = nn.Linear(256, 256, bias=False).double()
    trace = read_trace(record(training(linear, torch.randn(256, 256, dtype=torch.float64))))
    [finding] = [f for f in diagnose(trace, least=0.0).findings if f.finding == "fp64 products"]
    products = sum(op.us for op in trace.ops if op.name == "aten::mm")
    assert finding.gain_ms == pytest.approx(saved * products / 3 / 1e3, rel=1e-3)


def test_rates_are_measured_once_and_change_no_random_number():
    rates.speedups.cache_clear()
    state = torch.get_rng_state()
    assert rates.speedups() is rates.speedups()
    assert torch.equal(torch.get_rng_state(), state)


def spelled_out(logits, targets):
    return -torch.softmax(logits, -1).clamp(min=1e-38).log().gather(1, targets[:, None]).mean()


@pytest.mark.parametrize(
    ("loss", "words", "named"), [(spelled_out, 8192, True), (F.cross_entropy, 8192, False), (spelled_out, 64, False)]
)
def test_a_loss_in_separate_ops_is_named_where_its_tensors_are_too_large_for_the_cache(loss, words, named):
    logits, targets = torch.randn(64, words, requires_grad=True), torch.randint(words, (64,))
    gained = gains(lambda: loss(logits, targets).backward())
    assert ("unfused elementwise operations" in gained) == named
    if named:
        where = gained["unfused elementwise operations"].where
        assert "spelled_out" in where and "test_on_cpu.py" in where
        assert 0.2 < gained["unfused elementwise operations"].gain_share < 0.75


def test_a_chain_without_a_backward_pass_is_not_named():
    x = torch.randn(64, 8192, requires_grad=True)
    assert "unfused elementwise operations" in gains(lambda: x.exp().log().tanh().sum().backward())
    assert "unfused elementwise operations" not in gains(torch.no_grad()(lambda: x.exp().log().tanh()))


def test_what_each_step_builds_alike_is_constant_which_one_step_cannot_show():
    def step():
        return (torch.ones(64, 64).tril() * 2).sum()

    names = {n: {f.finding for f in diagnose(record(step, steps=n), least=0.0).findings} for n in (1, 3)}
    assert "repeated constant work" in names[3] - names[1]


@pytest.mark.parametrize(("width", "saved"), [(8, 0.93), (2048, 2 / 3)])
def test_an_unfused_optimizer_gains_its_calls_and_the_traffic_that_a_fused_one_saves(width, saved):
    model = nn.Linear(width, width)
    model(torch.randn(4, width)).sum().backward()
    optimizer = torch.optim.AdamW(model.parameters(), **EAGER)
    shares = []
    for _ in range(3):  # an op during which others had the core looks like one of a large tensor
        diagnosis = diagnose(read_trace(record(optimizer.step)))
        [finding] = [finding for finding in diagnosis.findings if finding.finding == "unfused optimizer"]
        shares.append(finding.gain_share / diagnosis.host["optimizer"])
    assert sorted(shares)[1] == pytest.approx(saved, rel=0.1)


@pytest.mark.parametrize(("tokens", "gains_some"), [(64, False), (600, True)])
def test_attention_whose_weights_stay_in_the_cache_gains_nothing(tokens, gains_some):
    q = torch.randn(2, tokens, 16, requires_grad=True)
    gained = gains(lambda: torch.bmm(torch.softmax(torch.bmm(q, q.mT), -1), q).sum().backward())
    assert (gained["attention from matmul and softmax"].gain_ms > 0) == gains_some


def test_small_operators_are_named_where_calls_take_the_time_and_large_ones_never():
    small, large = nn.Linear(8, 8), nn.Linear(1024, 1024)
    found = gains(lambda: small(torch.randn(4, 8)).square().mean().backward())
    assert found["small operators"].gain_share > 0 and "test_on_cpu.py" in found["small operators"].where
    none = gains(lambda: large(torch.randn(2048, 1024)).square().mean().backward()).get("small operators")
    assert none is None or none.gain_share < 0.02  # one whose thread lost its core


def test_small_operators_of_many_lines_come_after_a_single_change_that_brings_more_than_half(fast_bf16):
    small, x = nn.Linear(8, 8), torch.randn(4, 8)

    def one_line():
        sum(small(x).square().mean() for _ in range(30)).backward()

    def many_lines():
        a = small(x) + 1
        b = a.sin() * 2
        c = b.cos() - 3
        (small(c).tanh() / 4).mean().backward()

    def found(step):
        for _ in range(5):  # a core that others have just then makes operators long
            if finding := gains(step).get("small operators"):
                return finding
        raise AssertionError("no small operators")

    one, spread = found(one_line), found(many_lines)
    assert spread.spread and not one.spread
    setting = replace(one, finding="unfused optimizer", gain_share=0.6 * one.gain_share)
    assert ranked([one, setting])[0] is one and ranked([replace(one, spread=True), setting])[0] is setting


def test_gradients_of_a_whole_table_are_named_unless_a_batch_reads_much_of_it():
    table, ids = nn.Embedding(100_000, 8), torch.randint(100_000, (64,))
    found = gains(lambda: table(ids).square().mean().backward())["dense embedding gradients"]
    assert "100,000 rows, of which a batch reads 64" in found.evidence and "test_on_cpu.py" in found.where
    sparse = nn.Embedding(1000, 8, sparse=True)
    sgd = torch.optim.SGD(sparse.parameters(), lr=0.1)

    def step():
        sgd.zero_grad()
        sparse(ids % 1000).square().mean().backward()
        sgd.step()

    assert not {"dense embedding gradients", "unfused optimizer"} & gains(step).keys()
    few = nn.Embedding(100, 8)
    assert "dense embedding gradients" not in gains(lambda: few(ids % 100).square().mean().backward())


def test_one_thread_is_named_where_long_operators_run_and_with_what_set_it():
    large = nn.Linear(1024, 1024)
    trace = read_trace(record(lambda: large(torch.randn(2048, 1024)).square().mean().backward()))
    assert "one thread" not in {f.finding for f in diagnose(trace, least=0.0).findings}
    trace.about["settings"] = {"one thread": "train.py:3  torch.set_num_threads(1)", "cores": 4}
    [found] = [f for f in diagnose(trace, least=0.0).findings if f.finding == "one thread"]
    assert 0.3 < found.gain_share <= 0.75 and "train.py:3" in found.where
