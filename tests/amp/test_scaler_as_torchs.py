"""`DynamicGradScaler` where `torch.amp.GradScaler` was: its arguments, callers that pass closures, copies, sharded
gradients, compiled steps."""

import copy
import io
import math
import pickle
import warnings

import distributed_cases
import numpy as np
import pytest
import torch

from helpers.amp import DynamicGradScaler, StaticGradScaler
from helpers.distributed import launch


def layer_with(**options):
    torch.manual_seed(0)
    layer = torch.nn.Linear(4, 3)
    return layer, torch.optim.AdamW(layer.parameters(), lr=0.1, **options)


def train(scaler, layer, optimizer, factor=1.0):
    optimizer.zero_grad()
    scaler.scale(layer(torch.full((2, 4), factor)).square().mean()).backward()
    scaler.step(optimizer)
    scaler.update()


def test_the_arguments_stand_where_torchs_do():
    given = ("cpu", 2.0**10, 3.0, 0.25, 7, True)
    ours, theirs = DynamicGradScaler(*given), torch.amp.GradScaler(*given)
    assert ours.state_dict() == theirs.state_dict()
    assert DynamicGradScaler(torch.device("cpu")).state_dict() == torch.amp.GradScaler("cpu").state_dict()
    for name in ("growth_factor", "backoff_factor", "growth_interval"):
        assert getattr(ours, f"get_{name}")() == getattr(theirs, f"get_{name}")()
    with pytest.raises(ValueError, match=r"device is 1024.0; .* the scale is init_scale"):
        DynamicGradScaler(1024.0)


def test_what_takes_torchs_scaler_takes_ours():
    """As libraries that shard gradients read a scaler: by its type, its scale and the division of its gradients."""
    ours = DynamicGradScaler("cpu", 2.0**4)
    assert isinstance(ours, torch.amp.GradScaler)
    layer, optimizer = layer_with()
    ours.scale(layer(torch.ones(2, 4)).sum()).backward()
    found_inf = torch.zeros(())
    flags = ours._unscale_grads_(optimizer, ours._get_scale_async().reciprocal(), found_inf, False)
    assert [flag.item() for flag in flags.values()] == [0.0]
    assert torch.equal(layer.bias.grad, torch.full((3,), 2.0))
    layer.bias.grad[0] = math.inf
    assert [flag.item() for flag in ours._check_inf_per_device(optimizer).values()] == [1.0]


@pytest.mark.skipif(torch.cuda.is_available(), reason="CUDA is there")
def test_for_cuda_without_cuda_it_is_disabled_with_a_warning():
    with pytest.warns(UserWarning, match="is disabled: its device is 'cuda', which is not available"):
        assert not DynamicGradScaler("cuda").is_enabled()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert not DynamicGradScaler("cuda", enabled=False).is_enabled()


def test_the_rule_can_be_set_and_what_makes_no_sense_is_refused():
    scaler = DynamicGradScaler("cpu", init_scale=4.0)
    scaler.set_growth_factor(8.0)
    scaler.set_backoff_factor(0.125)
    scaler.set_growth_interval(np.int64(1))
    layer, optimizer = layer_with(fused=True)
    train(scaler, layer, optimizer)
    assert scaler.get_scale() == 32.0
    train(scaler, layer, optimizer, math.inf)
    assert scaler.get_scale() == 4.0
    for setter, bad in (("growth_factor", 0.5), ("backoff_factor", 1.5), ("growth_interval", 0)):
        with pytest.raises(ValueError, match=f"{setter} is {bad}"):
            getattr(scaler, f"set_{setter}")(bad)


@pytest.mark.parametrize("init_scale", [2.0**30, 2.0**-5])
def test_a_first_scale_outside_the_default_bounds_is_kept(init_scale):
    scaler = DynamicGradScaler("cpu", init_scale)
    train(scaler, *layer_with(fused=True), factor=0.5)
    assert scaler.get_scale() == init_scale


@pytest.mark.parametrize("scale", [1e-50, 1e39])
def test_a_scale_that_fp32_cannot_hold_is_refused(scale):
    with pytest.raises(ValueError, match="in fp32"):
        DynamicGradScaler(init_scale=scale)
    with pytest.raises(ValueError, match="in fp32"):
        DynamicGradScaler(min_scale=scale)
    scaler = StaticGradScaler()
    scaler.scale(torch.ones(()))
    with pytest.raises(ValueError, match="in fp32"):
        scaler.update(scale)


@pytest.mark.parametrize(
    "wrong",
    [{"scale": 0.0}, {"growth_factor": 0.5}, {"backoff_factor": 1.0}, {"growth_interval": 0}, {"_growth_tracker": -1}],
)
@pytest.mark.parametrize("started", [False, True])
def test_a_state_that_makes_no_sense_changes_nothing(wrong, started):
    scaler = DynamicGradScaler("cpu", 16.0, growth_interval=5)
    if started:
        train(scaler, *layer_with())
    before = scaler.state_dict()
    state = {"scale": 4.0, "growth_factor": 3.0, "backoff_factor": 0.25, "growth_interval": 2, "_growth_tracker": 1}
    with pytest.raises(ValueError, match=next(iter(wrong))):
        scaler.load_state_dict(state | wrong)
    del state["growth_factor"]
    with pytest.raises(ValueError, match="the state lacks growth_factor"):
        scaler.load_state_dict(state)
    assert scaler.state_dict() == before


def _saved(scaler):
    buffer = io.BytesIO()
    torch.save(scaler, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=False)


COPIES = {"pickle": lambda scaler: pickle.loads(pickle.dumps(scaler)), "deepcopy": copy.deepcopy, "torch.save": _saved}


@pytest.mark.parametrize("way", COPIES)
@pytest.mark.parametrize("build", [StaticGradScaler, DynamicGradScaler])
@pytest.mark.parametrize("steps", [0, 3])
def test_a_copy_goes_on_as_the_original(way, build, steps):
    scaler = build() if build is StaticGradScaler else build("cpu", 64.0, growth_interval=2)
    layer, optimizer = layer_with()
    for step in range(steps):
        train(scaler, layer, optimizer, math.inf if step == 1 else 1.0)
    other = COPIES[way](scaler)
    assert (other.state_dict(), other.skipped_steps()) == (scaler.state_dict(), scaler.skipped_steps())
    for each in (scaler, other):
        train(each, *layer_with())
    assert other.state_dict() == scaler.state_dict()
    if steps == 3 and build is DynamicGradScaler:
        assert (scaler.get_scale(), scaler.skipped_steps()) == (64.0, 1)


def test_in_the_middle_of_an_iteration_there_is_no_copy():
    scaler = DynamicGradScaler()
    layer, optimizer = layer_with()
    scaler.scale(layer(torch.ones(4)).sum()).backward()
    scaler.unscale_(optimizer)
    with pytest.raises(RuntimeError, match="in the middle of an iteration: call update first"):
        copy.deepcopy(scaler)


@pytest.mark.parametrize("options", [{"fused": True}, {"foreach": True}])
@pytest.mark.parametrize("call", [lambda s, o: s.step(o, None), lambda s, o: s.step(o, closure=None)])
def test_no_closure_may_be_passed_as_none(options, call):
    scaler = DynamicGradScaler()
    layer, optimizer = layer_with(**options)
    before = layer.weight.detach().clone()
    scaler.scale(layer(torch.ones(4)).sum()).backward()
    call(scaler, optimizer)
    assert not torch.equal(layer.weight, before)
    scaler.update()
    scaler.scale(layer(torch.ones(4)).sum()).backward()
    with pytest.raises(RuntimeError, match="no closure"):
        scaler.step(optimizer, lambda: None)


@pytest.mark.parametrize("options", [{"fused": True}, {"foreach": True}])
@pytest.mark.parametrize("clip", [False, True])
def test_gradients_that_are_all_empty_are_finite(options, clip):
    parameter = torch.nn.Parameter(torch.zeros(0, 3))
    optimizer = torch.optim.AdamW([parameter], **options)
    scaler = DynamicGradScaler("cpu", 4.0, growth_interval=1)
    scaler.scale(parameter.sum()).backward()
    if clip:
        assert scaler.clip_grad_norm_(optimizer, 1.0) == 0
    scaler.step(optimizer)
    scaler.update()
    assert (scaler.get_scale(), scaler.skipped_steps()) == (8.0, 0)


@pytest.mark.parametrize("enabled", [False, True])
def test_clipping_can_be_an_error_where_the_norm_is_not_finite(enabled):
    scaler = DynamicGradScaler(enabled=enabled)
    layer, optimizer = layer_with(fused=True)
    scaler.scale(layer(torch.full((4,), math.nan)).sum()).backward()
    with pytest.raises(RuntimeError, match=r"non-finite|norm is nan"):
        scaler.clip_grad_norm_(optimizer, 1.0, error_if_nonfinite=True)
    scaler.scale(layer(torch.ones(4)).sum())
    assert not torch.isfinite(scaler.clip_grad_norm_(optimizer, 1.0))


@pytest.mark.parametrize("clip", [False, True])
def test_a_compiled_step_is_the_step(clip):
    def run(wrap):
        scaler = DynamicGradScaler("cpu", 4.0, growth_interval=2)
        layer, optimizer = layer_with(fused=True)

        @wrap
        def step(x):
            optimizer.zero_grad()
            scaler.scale(layer(x).square().mean()).backward()
            if clip:
                scaler.clip_grad_norm_(optimizer, 0.1)
            scaler.step(optimizer)
            scaler.update()

        for factor in (1.0, 1.0, math.inf, 2.0, 1.0):
            step(torch.full((2, 4), factor))
        return scaler, layer

    compiled, compiled_layer = run(lambda step: torch.compile(step, backend="eager"))
    plain, layer = run(lambda step: step)
    assert compiled.state_dict() == plain.state_dict()
    assert compiled.skipped_steps() == plain.skipped_steps() == 1
    torch.testing.assert_close(compiled_layer.weight, layer.weight)


def test_sharded_gradients_of_two_ranks():
    launch(distributed_cases.scaled_steps, 2)
