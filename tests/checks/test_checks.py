"""A check passes what is right, ours and torch's, and names what is wrong with what isn't."""

import functools

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from helpers import checks
from helpers.amp import Autocast, DynamicGradScaler, StaticGradScaler
from helpers.batching import BalancedBatchSampler, pack
from helpers.swiglu import LEVELS, MemoryOptimizedSwigluMLPFunction


def failures(check):
    return [about for verdict, about in check.lines if verdict == "FAILS"]


def test_our_swiglu_holds_at_every_level():
    assert checks.swiglu(MemoryOptimizedSwigluMLPFunction, levels=[0, 1, 2, 3]).passed
    assert len(LEVELS) == 4


def test_a_swiglu_that_saves_too_much_or_has_a_wrong_derivative_is_told():
    def everything_saved(x, W, V, U, level):
        return (F.silu(x @ W) * (x @ V)) @ U

    assert [line.partition(":")[0] for line in failures(checks.swiglu(everything_saved))] == [
        "level 0 saves x, xW, SiLU(xW), xV",
        "level 1 saves x alone",
    ]

    class LostFactor(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, W, V, U, level):
            ctx.save_for_backward(x, W, V, U)
            return (F.silu(x @ W) * (x @ V)) @ U

        @staticmethod
        def backward(ctx, l):
            x, W, V, U = ctx.saved_tensors
            g, u = x @ W, x @ V
            sigma = torch.sigmoid(g)
            dz = l @ U.t()
            dg, du = dz * u * sigma * (g + 1 - sigma), dz * g * sigma  # the task's text
            rows = x.flatten(0, -2)
            grads = [rows.t() @ d.flatten(0, -2) for d in (dg, du)]
            return dg @ W.t() + du @ V.t(), *grads, (g * sigma * u).flatten(0, -2).t() @ l.flatten(0, -2), None

    said = checks.swiglu(LostFactor)
    wrong = failures(said)
    assert any("gradient of W" in line for line in wrong)
    assert "derivative of SiLU" in said.hint and "x is used twice" not in said.hint  # of x's gradient it is wrong, too
    assert not any("gradient of V" in line or "gradient of U" in line for line in wrong)


def test_what_is_written_in_part_is_attempted():
    def level_0(*tensors_and_level):
        if tensors_and_level[-1]:
            raise NotImplementedError
        return MemoryOptimizedSwigluMLPFunction.apply(*tensors_and_level)

    said = checks.swiglu(level_0)
    assert said.attempted and [verdict for verdict, _ in said.lines[:7]] == ["holds"] * 7
    assert failures(said) == ["level 1: the output is (SiLU(xW) ⊙ xV) U, for x (3, 7, d): NotImplementedError"]


def test_scalers_hold_ours_and_torchs():
    assert checks.grad_scaler(DynamicGradScaler).passed
    assert checks.grad_scaler(StaticGradScaler, dynamic=False).passed
    assert checks.grad_scaler(functools.partial(torch.amp.GradScaler, "cpu")).passed


def test_a_scaler_that_never_unscales_or_never_grows_is_told():
    class Never(torch.amp.GradScaler):
        def step(self, optimizer):
            optimizer.step()

        def update(self):
            pass

    wrong = failures(checks.grad_scaler(functools.partial(Never, "cpu")))
    assert any("unscaled training" in line for line in wrong)
    assert any("grows" in line for line in wrong)
    assert any("skipped" in line for line in wrong)


def test_autocasts_hold_ours_and_torchs():
    assert checks.autocast(Autocast).passed
    assert checks.autocast(functools.partial(torch.autocast, "cpu")).passed


def test_an_autocast_that_does_nothing_is_told():
    import contextlib

    wrong = failures(checks.autocast(lambda dtype: contextlib.nullcontext()))
    assert any("linear layer gives bfloat16" in line for line in wrong)


def accumulated(model, optimizer, scaler, micro_batches, unscales=True):
    optimizer.zero_grad()
    for inputs, targets in micro_batches:
        scaler.scale(F.mse_loss(model(inputs), targets) / len(micro_batches)).backward()
    if unscales:
        scaler.unscale_(optimizer)
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    scaler.step(optimizer)
    scaler.update()


def test_an_accumulated_step_holds_and_one_that_clips_scaled_gradients_is_told():
    assert checks.accumulated_step(accumulated).passed
    wrong = failures(checks.accumulated_step(functools.partial(accumulated, unscales=False)))
    assert any("4 micro-batches" in line for line in wrong)
    assert not any("inf" in line.partition(":")[0] for line in wrong)


def test_our_sampler_holds_and_a_sorted_one_doesnt():
    assert checks.batch_sampler(BalancedBatchSampler).passed

    def in_order(lengths, batch_size, k):
        order = np.argsort(lengths, kind="stable")
        return [order[i : i + batch_size] for i in range(0, len(order), batch_size)]

    assert [line.partition(":")[0] for line in failures(checks.batch_sampler(in_order))] == [
        "and once in a second epoch, in another order",
        "short and long batches come in random order",
    ]

    def losing(lengths, batch_size, k):
        return in_order(lengths, batch_size, k)[1:]

    assert any("every index" in line for line in failures(checks.batch_sampler(losing)))


def test_our_packing_holds_and_next_fit_or_overflow_is_told():
    assert checks.packing(lambda lengths, capacity: list(pack(lengths, capacity))).passed

    def next_fit(lengths, capacity):
        packs, room = [], 0
        for index, length in enumerate(lengths):
            if length > room:
                packs.append([])
                room = capacity
            packs[-1].append(index)
            room -= length
        return packs

    assert any("next fit" in line for line in failures(checks.packing(next_fit)))
    assert any("overflows" in line for line in failures(checks.packing(lambda lengths, _: [range(len(lengths))])))


@pytest.mark.parametrize("check", [checks.swiglu, checks.grad_scaler, checks.autocast, checks.batch_sampler])
def test_what_isnt_written_yet_is_not_attempted_and_what_raises_fails_in_a_line(check):
    def todo(*args, **kwargs):
        raise NotImplementedError

    assert repr(check(todo)) == "todo: not attempted"
    assert not check(todo).passed

    def broken(*args, **kwargs):
        raise KeyError("a\nlong\ntrace")

    said = check(broken)
    assert failures(said) and not said.passed
    assert "KeyError" in repr(said)
