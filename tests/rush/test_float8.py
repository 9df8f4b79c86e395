"""Linears in float8: near the bf16 product, with scales that use the whole range, and the same parameters."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from helpers.lab.timing import relative_error
from helpers.rush import float8
from helpers.rush.float8 import Float8Linear, convert, rounded


def test_a_layer_and_its_gradients_are_near_the_exact_ones():
    exact = nn.Linear(64, 128, bias=False)
    layer = Float8Linear(64, 128, bias=False)
    layer.load_state_dict(exact.state_dict())
    x = torch.randn(2, 24, 64)
    upstream = torch.randn(2, 24, 128)

    def gradients(linear):
        inputs = x.clone().requires_grad_()
        y = linear(inputs)
        y.backward(upstream.to(y.dtype))
        return y, inputs.grad, linear.weight.grad

    actual, expected = gradients(layer), gradients(exact)
    assert actual[0].dtype == torch.bfloat16
    assert actual[2].dtype == torch.float32
    # e4m3 is off by up to 1/16 of a number, e5m2 by 1/8; two rounded factors and no bias in either direction
    for ours, theirs, allowed in zip(actual, expected, (0.05, 0.08, 0.08), strict=True):
        assert 1e-3 < relative_error(ours, theirs) < allowed


@given(st.sampled_from([torch.float8_e4m3fn, torch.float8_e5m2]), st.floats(-30, 30))
def test_the_scale_makes_the_largest_magnitude_the_largest_number(dtype, exponent):
    x = torch.randn(64) * 2.0**exponent
    codes, scale = rounded(x, dtype)
    assert codes.float().abs().max() == torch.finfo(dtype).max
    torch.testing.assert_close(codes.float().abs().max() * scale, x.abs().max())


def test_zeros_stay_zeros():
    codes, _ = rounded(torch.zeros(16), torch.float8_e4m3fn)
    assert torch.equal(codes.float(), torch.zeros(16))


def test_converting_keeps_the_parameters_and_leaves_what_does_not_fit():
    model = nn.Sequential(nn.Linear(32, 48, bias=False), nn.Linear(48, 20, bias=False), nn.Linear(20, 32))
    before = dict(model.named_parameters())
    convert(model)
    assert [type(module) is Float8Linear for module in model] == [True, False, False]
    assert all(parameter is before[name] for name, parameter in model.named_parameters())


@pytest.mark.parametrize("fast", [True, False])
def test_a_product_of_small_whole_numbers_is_exact(fast):
    left, right = torch.randint(-4, 5, (32, 16)).bfloat16(), torch.randint(-4, 5, (16, 48)).bfloat16()
    left[0, 0] = right[0, 0] = 7.0  # so that the scale is a power of two: 448 / 7
    actual = float8.multiply(rounded(left, float8.E4M3), rounded(right, float8.E4M3), fast=fast)
    assert torch.equal(actual, (left.float() @ right.float()).bfloat16())
