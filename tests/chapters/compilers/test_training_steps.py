"""Training by compiled models: the same gradients and losses as eager, or a row that says otherwise."""

import copy
import functools
from importlib import import_module

import pytest
import torch
from torch import nn

from helpers.chapters.compilers import side_by_side, workloads
from helpers.chapters.compilers.training import check_gradient, check_losses, measure_training, training_step
from helpers.compilers import runtimes
from helpers.compilers.backends import COMPILE, EAGER, TRACE
from helpers.lab import Disagreement
from helpers.lab.timing import relative_error


def batch_of(model, batch):
    """Inputs and targets."""
    return *workloads.example(model, batch), workloads.targets(model, batch)


@pytest.fixture
def row_with(monkeypatch):
    """A row of training by a function of the model and its inputs in the place of a trace."""

    def row(call, precision="fp32"):
        monkeypatch.setattr(runtimes, "traced", lambda net, data: functools.partial(call, net))
        return measure_training(workloads.TINY_BERT, 8, [TRACE], precision=precision, seconds=0.1)[-1]

    return row


@pytest.mark.parametrize("model", [workloads.TINY_RESNET, workloads.TINY_BERT])
def test_torchscript_learns_as_eager_does(model, monkeypatch):
    monkeypatch.setattr(import_module("helpers.chapters.compilers.training"), "TOLERANCE", {"fp32": 5e-5})
    eager, row = measure_training(model, 4, [TRACE], seconds=0.1)
    assert row["n"] >= 8
    assert row["baseline_ms"] == eager["median_ms"]
    gained = (row["baseline_ms"] - row["median_ms"]) / 1e3
    assert row["break_even_steps"] == (pytest.approx(row["build_s"] / gained) if gained > 0 else None)


def test_autocast_is_the_same_inside_a_trace():
    assert "median_ms" in measure_training(workloads.TINY_BERT, 4, [TRACE], precision="bf16", seconds=0.1)[-1]


def test_a_gradient_in_bf16_may_be_as_far_from_fp32_as_eagers_is_and_a_little_more():
    exact = torch.zeros(300)
    exact[0] = 1.0
    there, across = torch.zeros(300), torch.zeros(300)
    there[100:200], across[200:300] = 0.0377, 0.0377  # rounding by 0.377 of the norm, in ways of their own
    assert relative_error(exact + there, exact + across) > 0.45
    check_gradient(COMPILE, exact + there, exact + across, exact, "bf16")
    with pytest.raises(Disagreement, match=r"differs by 0\.566 of fp32's norm; at most 0\.491"):
        check_gradient(COMPILE, exact + 1.5 * there, exact + across, exact, "bf16")
    with pytest.raises(Disagreement, match=r"differs by 0\.377 of eager's norm; at most 0\.02"):
        check_gradient(COMPILE, exact + there, exact, None, "fp32")
    with pytest.raises(Disagreement, match="gradient that differs by nan"):
        check_gradient(COMPILE, exact * float("nan"), exact, None, "fp32")


def test_a_compiled_step_learns_as_an_eager_one(monkeypatch):
    """Its forward and backward as Dynamo and AOTAutograd capture them; torch's own operations run them."""
    captured = functools.partial(runtimes.compiled_apart, backend="aot_eager")
    monkeypatch.setattr(runtimes, "compiled_apart", captured)
    net = workloads.Loss(nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3)))
    data = torch.randn(5, 6), torch.ones(5).long()
    steps = {backend: training_step(backend, copy.deepcopy(net), data, "SGD", "fp32") for backend in (EAGER, COMPILE)}
    losses = {backend: [float(step()) for _ in range(4)] for backend, step in steps.items()}
    assert losses[COMPILE] == pytest.approx(losses[EAGER], rel=1e-5)
    assert losses[EAGER][-1] < losses[EAGER][0]


def test_tracing_leaves_the_running_means_as_they_were():
    net = workloads.trainable(workloads.TINY_RESNET)
    before = {name: tensor.clone() for name, tensor in net.named_buffers()}
    training_step(TRACE, net, batch_of(workloads.TINY_RESNET, 4), "SGD", "fp32")
    torch.testing.assert_close(dict(net.named_buffers()), before)


def half_the_gradient(model, *inputs):
    loss = model(*inputs)
    return loss / 2 + loss.detach() / 2


@pytest.mark.parametrize(
    ("wrong", "precision"), [(half_the_gradient, "bf16"), (lambda model, *inputs: 2 * model(*inputs), "fp32")]
)
def test_a_backend_that_learns_something_else_is_a_row_that_says_so(wrong, precision, row_with):
    row = row_with(wrong, precision=precision)
    assert row["status"].startswith("failed: 'TorchScript, trace' has a gradient that differs")
    assert "median_ms" not in row


def test_a_step_that_fails_is_a_row_that_says_so(row_with):
    def failing(model, *inputs):
        raise RuntimeError("no code for this device")

    assert row_with(failing)["status"] == "failed: compile failed: no code for this device"


def test_building_ends_with_the_third_step(row_with, monkeypatch):
    clock, waits = [0.0], iter([0.0, 0.0, 0.3, 30.0])  # it still compiles in its third call, and waits in its fourth

    def slow(model, *inputs):
        clock[0] += next(waits, 0.0)
        return model(*inputs)

    monkeypatch.setattr("time.perf_counter", lambda: clock[0])
    monkeypatch.setattr(side_by_side, "compare", lambda runs, **settings: None)
    monkeypatch.setattr(side_by_side, "rounds_for", lambda runs, seconds: 1)
    monkeypatch.setattr(side_by_side, "speeds", lambda times, backend: {"baseline_ms": 1.0, "median_ms": 1.0})
    assert row_with(slow)["build_s"] == pytest.approx(0.3)


def test_the_first_step_that_differs_is_named():
    with pytest.raises(Disagreement, match=r"'compile' has loss 1\.5 at step 2, eager 1: 0\.5 of it apart"):
        check_losses(COMPILE, [1.0, 1.5], [1.0, 1.0], 1e-3)
    with pytest.raises(Disagreement, match="loss nan at step 1"):
        check_losses(COMPILE, [float("nan")], [1.0], 1e-3)
