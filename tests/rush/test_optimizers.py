"""Variants of AdamW take the same step; with a small state it trains like AdamW, rounds fairly, and can be resumed."""

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from helpers.lab.timing import check_agreement
from helpers.rush import optimizers
from helpers.rush.optimizers import BLOCK, STATES, SmallStateAdamW, pack, round_at_random, unpack


def problem(dtype=torch.float32):
    """A network of one hidden layer, and a step that fits it to another one's outputs."""
    torch.manual_seed(1)
    teacher, x = nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 16)), torch.randn(256, 16)
    y = 3 * teacher(x).detach()
    model = nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 16)).to(dtype)

    def step(optimizer):
        loss = F.mse_loss(model(x.to(dtype)).float(), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.item()

    return model, step


def train(build, steps=150, dtype=torch.float32):
    model, step = problem(dtype)
    optimizer = build(model.parameters())
    return [step(optimizer) for _ in range(steps)]


@pytest.mark.parametrize("state", STATES)
def test_it_trains_like_adamw(state):
    options = {"lr": 3e-3, "weight_decay": 0.1}
    expected = train(lambda params: torch.optim.AdamW(params, **options))
    actual = train(lambda params: SmallStateAdamW(params, state=state, **options))
    assert expected[-1] < 0.2 * expected[0]
    assert actual[-1] == pytest.approx(expected[-1], rel=0.1)


@pytest.mark.parametrize("state", STATES)
def test_the_first_step_is_adamws(state):
    weight = torch.randn(4, BLOCK, requires_grad=True)
    copy = weight.detach().clone().requires_grad_()
    weight.grad = torch.randn_like(weight)
    copy.grad = weight.grad.clone()
    SmallStateAdamW([weight], lr=0.1, weight_decay=0.3, state=state).step()
    torch.optim.AdamW([copy], lr=0.1, weight_decay=0.3).step()
    torch.testing.assert_close(weight, copy, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(("state", "bytes_each"), [("bf16", 4), ("8-bit", 2 + 8 / BLOCK)])
def test_the_state_takes_the_bytes_that_it_says(state, bytes_each):
    weight = torch.randn(8, BLOCK, requires_grad=True)
    weight.grad = torch.randn_like(weight)
    optimizer = SmallStateAdamW([weight], state=state)
    optimizer.step()
    held = sum(value.nbytes for name, value in optimizer.state[weight].items() if name != "step")
    assert held == bytes_each * weight.numel()


def known(size):
    """What the compiler knows a size to be; None if that differs from call to call."""
    return size if isinstance(size, int) else size.node.maybe_as_int()


def test_an_update_is_compiled_once_for_any_number_of_blocks_and_knows_how_long_they_are(monkeypatch):
    shapes = []

    def backend(graph, inputs):
        tensors = [node.meta["example_value"] for node in graph.graph.nodes if node.op == "placeholder"]
        shapes.append([tensor.shape for tensor in tensors if isinstance(tensor, torch.Tensor)])
        return graph.forward

    update = torch.compile(optimizers._update_8bit, backend=backend, dynamic=True)
    monkeypatch.setattr(optimizers, "_update_8bit", update)
    weights = [torch.randn(blocks, BLOCK, requires_grad=True) for blocks in (8, 12)]
    for weight in weights:
        weight.grad = torch.randn_like(weight)
    SmallStateAdamW(weights).step()
    (compiled,) = shapes
    rows = [shape for shape in compiled if len(shape) == 2]
    assert len(rows) == 4  # the weight, its gradient, and the codes of both moments
    assert [[known(size) for size in shape] for shape in rows] == [[None, BLOCK]] * 4


def test_what_is_no_whole_number_of_blocks_keeps_bf16():
    weight = torch.randn(BLOCK + 1, requires_grad=True)
    weight.grad = torch.randn_like(weight)
    optimizer = SmallStateAdamW([weight], state="8-bit")
    optimizer.step()
    assert optimizer.state[weight]["moment2"].dtype == torch.bfloat16


@pytest.mark.parametrize("state", STATES)
def test_a_slow_mean_reaches_what_rounding_to_nearest_would_stop_short_of(state):
    weight = torch.zeros(BLOCK, requires_grad=True)
    optimizer = SmallStateAdamW([weight], lr=0.0, state=state)
    for _ in range(1500):
        weight.grad = torch.ones(BLOCK)
        optimizer.step()
    kept = optimizer.state[weight]
    if state == "bf16":
        moment = kept["moment2"].float()
    else:
        moment = unpack(kept["codes2"].view(-1, BLOCK), kept["scale2"], 4, 255)
    assert moment.mean().item() == pytest.approx(1 - 0.999**1500, rel=0.05)


def test_small_updates_of_bf16_weights_are_not_lost_on_average():
    weight = torch.ones(64 * BLOCK, dtype=torch.bfloat16, requires_grad=True)
    optimizer = SmallStateAdamW([weight], lr=1e-4, weight_decay=0.0, state="bf16")
    for _ in range(20):  # each step subtracts 1e-4, where bf16 steps are 4e-3 wide below 1
        weight.grad = torch.ones_like(weight)
        optimizer.step()
    assert weight.float().mean().item() == pytest.approx(1 - 20e-4, abs=2e-4)


@pytest.mark.parametrize("state", STATES)
def test_a_resumed_run_goes_on_as_if_it_had_not_been_stopped(state):
    def build(params):
        return SmallStateAdamW(params, lr=3e-3, state=state)

    model, step = problem()
    optimizer = build(model.parameters())
    for _ in range(5):
        step(optimizer)
    other, other_step = problem()
    other.load_state_dict(model.state_dict())
    resumed = build(other.parameters())
    resumed.load_state_dict(optimizer.state_dict())
    for mine, theirs in zip(model.parameters(), other.parameters(), strict=True):
        for name, value in optimizer.state[mine].items():
            assert resumed.state[theirs][name].dtype == value.dtype
            assert torch.equal(resumed.state[theirs][name], value)
    losses = []
    for step_of, how in ((step, optimizer), (other_step, resumed)):
        torch.manual_seed(7)
        losses.append([step_of(how) for _ in range(3)])
    assert losses[0] == losses[1]


numbers = st.lists(st.floats(-1e6, 1e6, width=32), min_size=BLOCK, max_size=BLOCK).map(torch.tensor)


@settings(max_examples=25, deadline=None)
@given(numbers, st.sampled_from([1e-20, 1.0, 1e10]))
def test_packing_is_off_by_less_than_a_step(x, size):
    x = (x * size).view(1, BLOCK)
    for value, power, steps, dtype in ((x, 2, 127, torch.int8), (x.square() / (size * 1e6), 4, 255, torch.uint8)):
        actual = unpack(*pack(value, power, steps, dtype), power, steps)
        scale = value.abs().max().double().clamp(min=1e-300)
        share = (value.abs().double() / scale) ** (1 / power)
        above = (share + 1.001 / steps) ** power * scale
        below = (share - 1.001 / steps).clamp(min=0) ** power * scale
        assert (actual.abs().double() <= above * (1 + 1e-5)).all()
        assert (actual.abs().double() >= below * (1 - 1e-5)).all()
        assert ((actual == 0) | (actual.sign() == value.sign())).all()


def test_a_second_moment_above_zero_is_never_stored_as_zero():
    v = torch.zeros(2, BLOCK)
    v[0] = torch.logspace(-30, 0, BLOCK)
    codes, _ = pack(v, 4, 255, torch.uint8)
    assert (codes[0] > 0).all()
    assert (codes[1] == 0).all()


@given(st.floats(-(2.0**100), 2.0**100, width=32))
def test_random_rounding_takes_one_of_the_two_neighbours(value):
    x = torch.full((64,), value)
    actual = round_at_random(x).float()
    low = (x.view(torch.int32) & -65536).view(torch.float32)
    high = ((x.view(torch.int32) & -65536) + 65536).view(torch.float32)
    exact = low == x
    assert ((actual == low) | ((actual == high) & ~exact)).all()


def test_random_rounding_is_fair_and_keeps_what_is_not_finite():
    x = torch.full((100_000,), 1 + 2**-9)  # a quarter of the way from 1 to the next bf16
    assert round_at_random(x).float().mean().item() == pytest.approx(1 + 2**-9, abs=1e-4)
    special = torch.tensor([float("inf"), -float("inf"), float("nan")])
    torch.testing.assert_close(round_at_random(special).float(), special, equal_nan=True)


@pytest.mark.parametrize("variant", ["8-bit", "triton"])
def test_frozen_parameters_and_closures_are_as_in_any_optimizer(variant):
    weight, frozen = torch.ones(4, requires_grad=True), torch.ones(4, requires_grad=True)
    optimizer = optimizers.build(variant, [weight, frozen])

    def closure():
        loss = weight.sum()
        loss.backward()
        return loss

    assert optimizer.step(closure).item() == 4
    assert (weight < 1).all()
    assert torch.equal(frozen.detach(), torch.ones(4))


@pytest.mark.parametrize("name", ["for-loop", "foreach", "fused", "triton", "bf16-state", "8-bit"])
def test_every_optimizer_of_a_setup_makes_the_same_first_step(name):
    weight = torch.ones(BLOCK, requires_grad=True)
    weight.grad = torch.full((BLOCK,), 0.5)
    optimizers.build(name, [weight], lr=0.01, weight_decay=0.1).step()
    torch.testing.assert_close(weight.detach(), torch.full((BLOCK,), 1 - 0.01 * 0.1 - 0.01), atol=1e-5, rtol=0)


def test_the_variants_that_compute_the_same_agree_after_several_steps():
    start = [torch.randn(shape) for shape in ((5, 7), (3,), (1030,))]
    gradients = [[torch.randn_like(p) for p in start] for _ in range(3)]

    def updated(variant):
        params = [p.clone().requires_grad_() for p in start]
        optimizer = optimizers.build(variant, params, lr=1e-2, weight_decay=0.1)
        for one_step in gradients:
            for p, gradient in zip(params, one_step, strict=True):
                p.grad = gradient.clone()
            optimizer.step()
        return [p.detach() for p in params]

    here = [variant for variant in optimizers.VARIANTS if variant != optimizers.APEX]  # ours is torch's fused one here
    check_agreement({variant: lambda variant=variant: updated(variant) for variant in here}, 1e-6)


def test_an_unknown_variant_is_named():
    with pytest.raises(ValueError, match="variant is 'sgd'; valid: 'for-loop', "):
        optimizers.build("sgd", [])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"state": "4-bit"}, "state is '4-bit'; valid: 'bf16', '8-bit'"),
        ({"lr": -1.0}, r"lr is -1\.0; it must be at least 0"),
        ({"betas": (0.9, 1.0)}, r"a beta is 1\.0; it must be at least 0 and below 1"),
    ],
)
def test_wrong_settings_are_named(options, message):
    with pytest.raises(ValueError, match=message):
        SmallStateAdamW([torch.ones(1, requires_grad=True)], **options)
