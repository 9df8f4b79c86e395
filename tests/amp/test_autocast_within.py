"""Regions of `torch.autocast` inside `Autocast`: the innermost region rules."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.attention.flex_attention import flex_attention
from torch.utils.checkpoint import checkpoint

from helpers.amp import Autocast
from helpers.lab.precision import autocast_dtype, without_autocast

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
X = torch.ones(4, 4)
ALL = [{}, {"device_type": "cpu"}]


def product():
    return (X @ X).dtype


def rotary_angles(positions, frequencies):
    """As models compute them: by a product that they take out of autocast."""
    with torch.autocast(positions.device.type, enabled=False):
        return positions[:, None].float() @ frequencies[None].float()


@pytest.mark.parametrize("options", ALL)
def test_rotary_angles_of_long_sequences_stay_exact(options):
    positions, frequencies = torch.arange(4096), 10000.0 ** -(torch.arange(8) / 8)
    expected = rotary_angles(positions, frequencies)
    assert expected.max() == 4095
    with Autocast(BF16, **options):
        assert torch.equal(rotary_angles(positions, frequencies), expected)
        assert product() == BF16


@pytest.mark.parametrize("options", ALL)
@pytest.mark.parametrize(
    "call",
    [
        lambda: F.linear(X, X),
        lambda: F.scaled_dot_product_attention(X[None, None], X[None, None], X[None, None]),
        lambda: nn.LSTM(4, 4)(X)[0],
        lambda: nn.MultiheadAttention(4, 1)(X, X, X)[0],
    ],
)
def test_off_within_on_leaves_alone_until_it_ends(options, call):
    with Autocast(FP16, **options):
        assert call().dtype == FP16
        with torch.autocast("cpu", enabled=False):
            assert call().dtype == FP32
            assert autocast_dtype(X) is None
        assert call().dtype == FP16
        assert autocast_dtype(X) == FP16


def test_a_weight_that_was_cast_before_is_used_as_it_is():
    layer = nn.Linear(4, 4)
    with Autocast(BF16):
        assert layer(X).dtype == BF16
        with torch.autocast("cpu", enabled=False):
            assert layer(X).dtype == FP32


def test_with_another_type_it_has_that_type_and_range():
    with Autocast(FP16):
        with torch.autocast("cpu", dtype=BF16):
            y = F.linear(1e5 * X, X)
            assert autocast_dtype(X) == BF16
            with without_autocast(X):
                assert product() == FP32
        assert torch.isfinite(y).all()
        assert y.dtype == BF16
        assert product() == FP16


def test_regions_of_both_nest_in_any_order():
    with Autocast(FP16), torch.autocast("cpu", enabled=False):
        assert product() == FP32
        with Autocast(BF16):
            assert product() == BF16
            with torch.autocast("cpu", enabled=False), Autocast(enabled=False):
                assert product() == FP32
            assert product() == BF16
        assert product() == FP32
    with Autocast(enabled=False), torch.autocast("cpu", dtype=BF16):
        assert product() == BF16
    assert product() == FP32


def test_a_decorated_function_and_one_that_raises():
    @torch.autocast("cpu", enabled=False)
    def exact(fails=False):
        if fails:
            raise KeyError
        return product()

    with Autocast(BF16):
        assert exact() == FP32
        with pytest.raises(KeyError):
            exact(fails=True)
        assert product() == BF16


@pytest.mark.filterwarnings("ignore:User provided device_type")
def test_one_for_another_kind_of_device_changes_nothing_here():
    with Autocast(BF16), torch.autocast("cuda", enabled=False):
        assert product() == BF16
        with torch.autocast("cpu", enabled=False):
            assert product() == FP32
        assert product() == BF16


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("backward_within", [False, True])
def test_a_checkpoint_recomputes_what_the_forward_did(reentrant, backward_within):
    seen = []

    def layer(x, weight):
        y = x @ weight
        seen.append(y.dtype)
        with torch.autocast("cpu", enabled=False):
            return y.float() @ weight

    def gradient(run):
        weight, x = (0.3 * X).requires_grad_(), torch.arange(16.0).reshape(4, 4).requires_grad_()
        with Autocast(BF16):
            loss = run(layer, x, weight).square().mean()
            if backward_within:
                loss.backward()
        if not backward_within:
            loss.backward()
        return weight.grad

    expected = gradient(lambda function, *inputs: function(*inputs))
    found = gradient(lambda function, *inputs: checkpoint(function, *inputs, use_reentrant=reentrant))
    assert seen == [BF16] * 3
    assert torch.equal(found, expected)


def test_flex_attention_runs_in_the_type_of_its_inputs():
    torch.compiler.reset()
    layer, x = nn.Linear(16, 16).requires_grad_(False), torch.randn(1, 2, 16, 16)
    with Autocast(BF16):
        for q in (x, layer(x)):
            assert flex_attention(q, q, q).dtype == q.dtype
