"""`DynamicGradScaler` where `torch.amp.GradScaler` was: its arguments, callers that pass closures, copies, sharded
gradients, compiled steps."""

import copy
import io
import math
import pickle
import warnings

import pytest
import torch

from helpers.amp import DynamicGradScaler, StaticGradScaler


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


def test_its_state_is_there_if_it_is_put_under_torchs_name(monkeypatch):
    monkeypatch.setattr(torch.amp, "GradScaler", DynamicGradScaler)
    scaler = torch.amp.GradScaler("cpu", 8.0)
    scaler.load_state_dict(scaler.state_dict() | {"scale": 4.0})
    assert scaler.state_dict()["scale"] == 4.0


@pytest.mark.skipif(torch.cuda.is_available(), reason="CUDA is there")
def test_for_cuda_without_cuda_it_is_disabled_with_a_warning():
    with pytest.warns(UserWarning, match="is disabled: its device is 'cuda', which is not available"):
        assert not DynamicGradScaler("cuda").is_enabled()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert not DynamicGradScaler("cuda", enabled=False).is_enabled()


@pytest.mark.parametrize(
    "wrong",
    [{"scale": 0.0}, {"growth_factor": 0.5}, {"backoff_factor": 1.0}, {"growth_interval": 0}, {"_growth_tracker": -1}],
)
def test_a_state_that_makes_no_sense_changes_nothing(wrong):
    scaler = DynamicGradScaler("cpu", 16.0, growth_interval=5)
    train(scaler, *layer_with())
    before = scaler.state_dict()
    state = {"scale": 4.0, "growth_factor": 3.0, "backoff_factor": 0.25, "growth_interval": 2, "_growth_tracker": 1}
    with pytest.raises(ValueError, match=next(iter(wrong))):
        scaler.load_state_dict(state | wrong)
    assert scaler.state_dict() == before


def _saved(scaler):
    buffer = io.BytesIO()
    torch.save(scaler, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=False)


COPIES = {"pickle": lambda scaler: pickle.loads(pickle.dumps(scaler)), "deepcopy": copy.deepcopy, "torch.save": _saved}


@pytest.mark.parametrize("way", COPIES)
@pytest.mark.parametrize("build", [StaticGradScaler, DynamicGradScaler])
def test_a_copy_goes_on_as_the_original(way, build):
    scaler = build() if build is StaticGradScaler else build("cpu", 64.0, growth_interval=2)
    layer, optimizer = layer_with()
    for step in range(3):
        train(scaler, layer, optimizer, math.inf if step == 1 else 1.0)
    other = COPIES[way](scaler)
    assert (other.state_dict(), other.skipped_steps()) == (scaler.state_dict(), scaler.skipped_steps())
    for each in (scaler, other):
        train(each, *layer_with())
    assert other.state_dict() == scaler.state_dict()
    if build is DynamicGradScaler:
        assert (scaler.get_scale(), scaler.skipped_steps()) == (64.0, 1)


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


def test_a_compiled_step_is_the_step():
    def run(wrap):
        scaler = DynamicGradScaler("cpu", 4.0, growth_interval=2)
        layer, optimizer = layer_with(fused=True)

        @wrap
        def step(x):
            optimizer.zero_grad()
            scaler.scale(layer(x).square().mean()).backward()
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
