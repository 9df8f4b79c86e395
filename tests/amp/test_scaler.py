"""The scalers against torch's own, and what they do that torch's doesn't."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from helpers.amp import DynamicGradScaler, StaticGradScaler
from helpers.chapters.amp.scaler_step import OURS, TORCHS, host_reads, operations, scaler_steps

OPTIMIZERS = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.01, momentum=0.9),
    "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=0.01, foreach=True),
    "fused adamw": lambda parameters: torch.optim.AdamW(parameters, lr=0.01, fused=True),
    "fused sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.01, momentum=0.9, fused=True),
}


def model_with(optimizer, sizes=(3, 2)):
    generator = torch.Generator().manual_seed(1)
    parameters = [torch.randn(size, generator=generator).requires_grad_() for size in sizes]
    return parameters, OPTIMIZERS[optimizer](parameters)


def backward(scaler, parameters, directions):
    """Gradients are `directions`, times the scale."""
    loss = sum((parameter * direction).sum() for parameter, direction in zip(parameters, directions, strict=True))
    scaler.scale(loss).backward()


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_equals_torchs_scaler_bit_for_bit(optimizer):
    arguments = {"init_scale": 2.0**12, "growth_factor": 1.7, "backoff_factor": 0.6, "growth_interval": 3}
    ours = DynamicGradScaler(**arguments)
    theirs = torch.amp.GradScaler("cpu", **arguments)
    runs = [(scaler, *model_with(optimizer)) for scaler in (ours, theirs)]
    choose = np.random.default_rng(0)
    skipped, steps = 0, 100
    for step in range(steps):
        directions = [torch.from_numpy(choose.standard_normal(size, dtype=np.float32)) for size in (3, 2)]
        # not in the first step, which torch's scaler spoils with fused SGD (see _hands_over)
        if choose.random() < 0.2 and step > 0:
            bad = [math.inf, -math.inf, math.nan][choose.integers(3)]
            directions[choose.integers(2)][choose.integers(2)] = bad
            skipped += 1
        first_unscale, accumulate = choose.random(2) < 0.3
        new_scale = float(2.0 ** choose.integers(10, 14)) if choose.random() < 0.05 else None
        for scaler, parameters, stepper in runs:
            stepper.zero_grad()
            for _ in range(2 if accumulate else 1):
                backward(scaler, parameters, directions)
            if first_unscale:
                scaler.unscale_(stepper)
            scaler.step(stepper)
            scaler.update(new_scale)
        assert ours._scale.item() == theirs._scale.item(), step
        for a, b in zip(runs[0][1], runs[1][1], strict=True):
            assert torch.equal(a, b), step
    assert skipped > steps / 8
    assert all(torch.isfinite(parameter).all() for parameter in runs[0][1])


@pytest.mark.parametrize("optimizer", ["fused adamw", "fused sgd"])
@pytest.mark.parametrize("clip", [False, True])
def test_a_fused_step_reads_nothing_on_the_host(optimizer, clip):
    scaler = DynamicGradScaler()
    parameters, stepper = model_with(optimizer)

    def train():
        stepper.zero_grad()
        backward(scaler, parameters, [torch.ones(3), torch.ones(2)])
        if clip:
            scaler.clip_grad_norm_(stepper, 1.0)
        scaler.step(stepper)
        scaler.update()

    train()  # the first step of fused SGD does wait
    assert [host_reads(train) for _ in range(3)] == [0, 0, 0]


def test_a_first_step_that_is_skipped_leaves_no_trace_in_fused_sgd():
    (ours, our_stepper), (theirs, their_stepper) = model_with("fused sgd"), model_with("sgd")
    scaler = DynamicGradScaler(init_scale=4.0)
    for bad in (True, False, False):
        our_stepper.zero_grad()
        backward(scaler, ours, [torch.full((3,), math.inf if bad else 1.0), torch.ones(2)])
        scaler.step(our_stepper)
        scaler.update()
        if not bad:
            for parameter in theirs:
                parameter.grad = torch.ones_like(parameter)
            their_stepper.step()
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("optimizer", ["adamw", "fused sgd"])
def test_a_step_that_would_wait_inside_a_capture_is_refused(monkeypatch, optimizer):
    scaler = DynamicGradScaler()
    parameters, optimizer = model_with(optimizer)
    backward(scaler, parameters, [1.0, 1.0])
    monkeypatch.setattr("helpers.amp.scaler._is_captured", lambda tensor: True)
    with pytest.raises(RuntimeError, match="fused=True, and take its first step outside"):
        scaler.step(optimizer)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("unscale_first", [False, True])
@settings(max_examples=6, deadline=None)
@given(size=st.floats(1e-3, 1e3), max_norm=st.floats(0.1, 100), scale=st.sampled_from([1.0, 2.0**12, 3.0, 2.0**24]))
def test_clipping_is_torchs_clipping_of_unscaled_gradients(optimizer, unscale_first, size, max_norm, scale):
    directions = [torch.tensor([size, -2 * size, 0.5]), torch.tensor([3 * size, 0.0])]
    scaler = StaticGradScaler(scale)
    ours, our_stepper = model_with(optimizer)
    theirs, their_stepper = model_with(optimizer)
    backward(scaler, ours, directions)
    for parameter, direction in zip(theirs, directions, strict=True):
        parameter.grad = direction.clone()
    if unscale_first:
        scaler.unscale_(our_stepper)
    norm = scaler.clip_grad_norm_(our_stepper, max_norm)
    expected = torch.nn.utils.clip_grad_norm_(theirs, max_norm)
    torch.testing.assert_close(norm, expected, rtol=1e-5, atol=0)
    scaler.step(our_stepper)
    their_stepper.step()
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("bad", [math.inf, math.nan])
@pytest.mark.parametrize("clip", [False, True])
def test_a_step_that_is_not_finite_changes_nothing_and_is_counted(optimizer, bad, clip):
    scaler = DynamicGradScaler(init_scale=8.0)
    parameters, stepper = model_with(optimizer)
    before = [parameter.detach().clone() for parameter in parameters]
    backward(scaler, parameters, [torch.tensor([1.0, bad, 1.0]), torch.ones(2)])
    if clip:
        assert not torch.isfinite(scaler.clip_grad_norm_(stepper, 1.0))
    scaler.step(stepper)
    scaler.update()
    assert all(torch.equal(a, b) for a, b in zip(parameters, before, strict=True))
    assert scaler.get_scale() == 4.0
    assert scaler.skipped_steps() == 1


def test_several_optimizers_share_a_scale_and_skip_apart():
    ours = DynamicGradScaler(init_scale=8.0)
    (first, first_stepper), (second, second_stepper) = model_with("sgd"), model_with("fused adamw")
    before = [p.detach().clone() for p in (*first, *second)]
    backward(ours, first, [torch.ones(3), torch.ones(2)])
    backward(ours, second, [torch.full((3,), math.inf), torch.ones(2)])
    ours.step(first_stepper)
    ours.step(second_stepper)
    ours.update()
    changed = [not torch.equal(a, b) for a, b in zip((*first, *second), before, strict=True)]
    assert changed == [True, True, False, False]
    assert (ours.get_scale(), ours.skipped_steps()) == (4.0, 1)


def test_missing_and_sparse_gradients():
    table = torch.nn.Embedding(10, 4, sparse=True)
    unused = torch.nn.Parameter(torch.ones(3))
    before = table.weight.detach().clone()
    stepper = torch.optim.SGD([unused, *table.parameters()], lr=1.0)
    scaler = StaticGradScaler(1024.0)
    scaler.scale(table(torch.tensor([1, 1, 2])).sum()).backward()
    scaler.unscale_(stepper)
    scaler.step(stepper)
    scaler.update()
    expected = before.clone()
    expected[1] -= 2.0
    expected[2] -= 1.0
    torch.testing.assert_close(table.weight.detach(), expected)
    assert unused.grad is None


def test_nested_outputs_are_scaled_where_they_stand():
    scaler = StaticGradScaler(4.0)
    one = torch.ones(())
    result = scaler.scale([one, (one,), (t for t in [one])])
    assert result[0] == result[1][0] == 4
    assert list(result[2]) == [torch.tensor(4.0)]
    with pytest.raises(ValueError, match="not int"):
        scaler.scale(3)


@settings(max_examples=30, deadline=None)
@given(
    bad=st.lists(st.booleans(), min_size=1, max_size=25),
    growth=st.floats(1.01, 8),
    backoff=st.floats(0.05, 0.99),
    interval=st.integers(1, 4),
    start=st.floats(2.0**-2, 2.0**25, width=32),
)
def test_the_scale_moves_by_the_rule_and_within_bounds(bad, growth, backoff, interval, start):
    ours, bounds = DynamicGradScaler("cpu", start, growth, backoff, interval), (min(1.0, start), max(2.0**24, start))
    parameter = torch.ones(1, requires_grad=True)
    stepper = torch.optim.SGD([parameter], lr=0.0)
    expected, good_steps = start, 0
    for overflow in bad:
        ours.scale(torch.ones(()))
        parameter.grad = torch.tensor([math.inf if overflow else 1.0])
        ours.step(stepper)
        ours.update()
        good_steps = 0 if overflow else good_steps + 1
        if overflow:
            expected *= backoff
        elif good_steps == interval:
            expected, good_steps = expected * growth, 0
        expected = float(np.float32(min(max(float(np.float32(expected)), bounds[0]), bounds[1])))
        assert ours.get_scale() == expected


def test_a_handed_over_step_has_no_more_operations_than_torchs_scaler():
    parameters = [torch.ones(3, requires_grad=True) for _ in range(4)]
    for parameter in parameters:
        parameter.grad = torch.ones(3)
    counts = {}
    for name, step in scaler_steps(parameters).items():
        step()
        counts[name] = len(operations(step))
    assert counts[OURS] <= counts[TORCHS]


def test_states_are_exchanged_with_torchs_scaler():
    ours, theirs = DynamicGradScaler(growth_interval=5), torch.amp.GradScaler("cpu", growth_interval=5)
    parameters, stepper = model_with("sgd")
    for _ in range(3):
        stepper.zero_grad()
        backward(ours, parameters, [torch.ones(3), torch.ones(2)])
        ours.step(stepper)
        ours.update()
    state = ours.state_dict()
    theirs.load_state_dict(state)
    assert theirs.state_dict() == state
    fresh = DynamicGradScaler()
    fresh.load_state_dict(theirs.state_dict())
    assert fresh.state_dict() == state


def test_disabled_it_stays_out_of_the_way():
    scaler = DynamicGradScaler(enabled=False)
    parameters, stepper = model_with("sgd")
    backward(scaler, parameters, [torch.ones(3), torch.ones(2)])
    assert torch.equal(parameters[0].grad, torch.ones(3))
    scaler.unscale_(stepper)
    assert scaler.clip_grad_norm_(stepper, 100.0) == pytest.approx(5**0.5)
    scaler.step(stepper)
    scaler.update()
    assert (scaler.is_enabled(), scaler.get_scale(), scaler.state_dict()) == (False, 1.0, {})
    loss = torch.ones(())
    assert scaler.scale(loss) is loss


@pytest.mark.parametrize("optimizer", ["sgd", "fused adamw"])
def test_calls_out_of_order_say_what_to_do(optimizer):
    scaler = DynamicGradScaler()
    parameters, stepper = model_with(optimizer)
    for call in (scaler.unscale_, scaler.step, lambda o: scaler.clip_grad_norm_(o, 1.0)):
        with pytest.raises(RuntimeError, match="before scale"):
            call(stepper)
    with pytest.raises(RuntimeError, match="update before scale"):
        scaler.update()
    scaler.scale(torch.ones(()))
    with pytest.raises(RuntimeError, match="update without step"):
        scaler.update()
    with pytest.raises(RuntimeError, match="no gradients"):
        scaler.step(stepper)
    backward(scaler, parameters, [torch.ones(3), torch.ones(2)])
    scaler.unscale_(stepper)
    with pytest.raises(RuntimeError, match="unscale_ is called once"):
        scaler.unscale_(stepper)
    scaler.step(stepper)
    for call, message in ((scaler.step, "step after step"), (scaler.unscale_, "unscale_ is called once")):
        with pytest.raises(RuntimeError, match=message):
            call(stepper)
    with pytest.raises(RuntimeError, match="clip_grad_norm_ is called once"):
        scaler.clip_grad_norm_(stepper, 1.0)


def test_gradients_of_a_pure_fp16_model_are_refused():
    parameter = torch.ones(2, dtype=torch.float16, requires_grad=True)
    scaler, stepper = DynamicGradScaler(), torch.optim.SGD([parameter], lr=1.0)
    scaler.scale(parameter.sum()).backward()
    with pytest.raises(ValueError, match="a gradient is in fp16: keep the parameters in fp32"):
        scaler.step(stepper)


@pytest.mark.parametrize("scale", [0.0, -1.0, math.inf, math.nan, 1e-50, 1e39])
def test_a_scale_that_makes_no_sense_is_named(scale):
    for build in (StaticGradScaler, lambda scale: DynamicGradScaler(init_scale=scale)):
        with pytest.raises(ValueError, match="it must be above 0 and finite in fp32"):
            build(scale)
    scaler = DynamicGradScaler()
    scaler.scale(torch.ones(()))
    for new_scale in (scale, torch.tensor(scale)):
        with pytest.raises(ValueError, match="new_scale is"):
            scaler.update(new_scale)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"growth_factor": 1.0}, "growth_factor is 1.0; it must be above 1"),
        ({"backoff_factor": 1.0}, "backoff_factor is 1.0; it must be between 0 and 1"),
        ({"growth_interval": 0}, "growth_interval is 0; it must be an integer of at least 1"),
        ({"device": 1024.0}, "device is 1024.0; .* the scale is init_scale"),
    ],
)
def test_arguments_that_make_no_sense_are_named(arguments, said):
    with pytest.raises(ValueError, match=said):
        DynamicGradScaler(**arguments)
