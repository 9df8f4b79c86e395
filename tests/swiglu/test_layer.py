"""The layer against the plain module, which is the oracle for everything but memory."""

from functools import partial

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from helpers.amp import Autocast
from helpers.chapters.swiglu import derived_costs as costs
from helpers.lab import saved_bytes
from helpers.lab.timing import relative_error
from helpers.swiglu import LEVELS, MemoryOptimizedSwigluMLP, MemoryOptimizedSwigluMLPFunction, SwigluMLP

EXACT = (0, 1, 2)


def pair(level, hidden=16, intermediate=48, dtype=torch.float32):
    plain = SwigluMLP(hidden, intermediate, dtype=dtype)
    return plain, MemoryOptimizedSwigluMLP.from_plain(plain, level)


def train(module, x, l):
    """Output and gradients of x, W, V, U; None for those that nobody asked for."""
    x = x.detach().clone().requires_grad_(x.requires_grad)
    module.zero_grad()
    y = module(x)
    y.backward(l.to(y.dtype))
    if isinstance(module, SwigluMLP):
        return [y, x.grad, *(getattr(module, name).weight.grad for name in "WVU")]
    return [y, x.grad, *(None if (g := getattr(module, name).grad) is None else g.t() for name in "WVU")]


def assert_equal(found, expected, tolerance):
    for ours, theirs in zip(found, expected, strict=True):
        assert (ours is None) == (theirs is None)
        if theirs is not None:
            assert ours.dtype == theirs.dtype
            assert ours.shape == theirs.shape
            assert relative_error(ours, theirs) <= tolerance


@pytest.mark.parametrize("level", EXACT)
@settings(max_examples=10, deadline=None)
@given(
    leading=st.lists(st.integers(0, 5), max_size=3),
    hidden=st.integers(1, 20),
    intermediate=st.integers(1, 40),
    seed=st.integers(0, 1000),
)
def test_equals_the_plain_module_at_any_shape(level, leading, hidden, intermediate, seed):
    torch.manual_seed(seed)
    plain, ours = pair(level, hidden, intermediate)
    x = torch.randn(*leading, hidden, requires_grad=True)
    l = torch.randn(*leading, hidden)
    for a, b in zip(train(ours, x, l), train(plain, x, l), strict=True):
        torch.testing.assert_close(a, b, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("level", [0, 1])
def test_the_tasks_own_check(level):
    dummy_input = torch.randn(4, 32, 768)
    swiglu_mlp = SwigluMLP(768, 768 * 3)
    optimized = MemoryOptimizedSwigluMLP(768, 768 * 3, checkpoint_level=level)
    with torch.no_grad():  # weights that are transposed views, as the task makes them
        optimized.W.data = swiglu_mlp.W.weight.data.t()
        optimized.V.data = swiglu_mlp.V.weight.data.t()
        optimized.U.data = swiglu_mlp.U.weight.data.t()
    standard_output, optimized_output = swiglu_mlp(dummy_input), optimized(dummy_input)
    assert torch.allclose(standard_output, optimized_output, atol=1e-4)
    standard_output.sum().backward()
    optimized_output.sum().backward()
    assert torch.allclose(swiglu_mlp.U.weight.grad, optimized.U.grad.t(), atol=1e-4)
    assert torch.allclose(swiglu_mlp.V.weight.grad, optimized.V.grad.t(), atol=1e-4)
    assert torch.allclose(swiglu_mlp.W.weight.grad, optimized.W.grad.t(), atol=1e-4)


@pytest.mark.parametrize("level", EXACT)
def test_derivatives_in_fp64(level):
    shapes = [(3, 2), (2, 4), (2, 4), (4, 2)]
    inputs = [torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in shapes]
    assert torch.autograd.gradcheck(MemoryOptimizedSwigluMLPFunction.apply, (*inputs, level))


def test_8_bits_give_the_exact_output_and_gradients_within_a_percent():
    plain, ours = pair(3, 64, 256)
    x, l = torch.randn(64, 64, requires_grad=True), torch.randn(64, 64)
    found, expected = train(ours, x, l), train(plain, x, l)
    assert relative_error(found[0], expected[0]) < 1e-6
    errors = [relative_error(a, b) for a, b in zip(found[1:], expected[1:], strict=True)]
    assert max(errors) < 0.012
    assert min(errors) > 1e-4  # or it would not be rounding at all


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("input_dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("region", [partial(torch.autocast, "cpu"), Autocast])
def test_under_autocast_types_and_values_are_those_of_the_plain_module(level, input_dtype, region):
    plain, ours = pair(level, 32, 96)
    x, l = torch.randn(40, 32, dtype=input_dtype, requires_grad=True), torch.randn(40, 32)
    with region(dtype=torch.bfloat16):
        found, expected = train(ours, x, l), train(plain, x, l)
        kept = saved_bytes(lambda: ours(x), without=ours.parameters())
    assert kept == costs.saved_bytes(level, 40, 32, 96, 2)
    assert found[0].dtype == torch.bfloat16
    assert found[2].dtype == torch.float32
    assert_equal(found, expected, 3e-2)


def test_backward_inside_autocast_keeps_the_type_of_forward():
    plain, ours = pair(2)
    x, l = torch.randn(5, 16, requires_grad=True), torch.randn(5, 16)
    expected = train(plain, x, l)
    y = ours(x)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y.backward(l)
    assert relative_error(ours.W.grad.t(), expected[2]) < 1e-5


@pytest.mark.parametrize("level", EXACT)
@pytest.mark.parametrize("view", [lambda t: t[:1].expand(4, -1, -1), lambda t: t.permute(1, 0, 2)[1:]])
def test_non_contiguous_input(level, view):
    plain, ours = pair(level)
    x = view(torch.randn(4, 6, 16)).requires_grad_()
    l = view(torch.randn(4, 6, 16))
    assert not x.is_contiguous()
    assert_equal(train(ours, x, l), train(plain, x, l), 1e-5)


@pytest.mark.parametrize("level", EXACT)
@pytest.mark.parametrize("needs", [1, 2, 4, 8, 7, 11, 13, 14])  # each alone, each left out
def test_frozen_parts_get_no_gradient_and_the_others_the_right_one(level, needs):
    plain, ours = pair(level)
    wanted = [bool(needs & (1 << bit)) for bit in range(4)]
    x = torch.randn(5, 16, requires_grad=wanted[0])
    l = torch.randn(5, 16)
    for name, want in zip("WVU", wanted[1:], strict=True):
        getattr(plain, name).weight.requires_grad_(want)
        getattr(ours, name).requires_grad_(want)
    found, expected = train(ours, x, l), train(plain, x, l)
    assert [g is not None for g in found[1:]] == wanted
    assert_equal(found, expected, 1e-5)


def test_double_backward_is_refused():
    x = torch.randn(5, 16, requires_grad=True)
    (gradient,) = torch.autograd.grad(MemoryOptimizedSwigluMLP(16, 48)(x).sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="double backward"):
        gradient.pow(2).sum().backward()


def test_works_inside_torchs_checkpoint_and_with_offloaded_activations():
    plain, ours = pair(2)
    x, l = torch.randn(5, 16, requires_grad=True), torch.randn(5, 16)
    expected = train(plain, x, l)
    y = torch.utils.checkpoint.checkpoint(ours, x, use_reentrant=False)
    assert_equal(torch.autograd.grad(y, x, l), expected[1:2], 1e-5)
    with torch.autograd.graph.save_on_cpu():
        y = ours(x)
    assert_equal(torch.autograd.grad(y, x, l), expected[1:2], 1e-5)


def test_all_levels_share_one_state_dict():
    source = MemoryOptimizedSwigluMLP(16, 48, 0)
    x = torch.randn(5, 16)
    for level in LEVELS:
        other = MemoryOptimizedSwigluMLP(16, 48, level)
        other.load_state_dict(source.state_dict())
        assert torch.equal(other(x), source(x))
    source.checkpoint_level = np.int64(3)
    assert type(source.checkpoint_level) is int
    assert source(x).requires_grad


def test_without_gradients_nothing_is_kept():
    layer = MemoryOptimizedSwigluMLP(16, 48, 0)
    with torch.no_grad():
        assert layer(torch.randn(5, 16)).grad_fn is None
    with torch.inference_mode():
        assert layer(torch.randn(5, 16)).shape == (5, 16)


def test_weights_are_initialised_like_those_of_a_linear():
    layer, plain = MemoryOptimizedSwigluMLP(64, 256, 1), SwigluMLP(64, 256)
    for name in "WVU":
        ours, theirs = getattr(layer, name), getattr(plain, name).weight
        assert ours.shape == theirs.t().shape
        bound = ours.shape[0] ** -0.5
        assert 0.98 * bound < ours.abs().max() <= bound
        assert ours.std().item() == pytest.approx(theirs.std().item(), rel=0.03)


@pytest.mark.parametrize("level", [-1, 4, 1.5, "2", True])
def test_a_wrong_level_names_what_is_allowed(level):
    with pytest.raises(ValueError, match=r"checkpoint_level is .*; allowed: 0 keeps x, xW"):
        MemoryOptimizedSwigluMLP(16, 48, level)


def test_a_wrong_size_is_named():
    with pytest.raises(ValueError, match=r"intermediate_size is 2\.0"):
        MemoryOptimizedSwigluMLP(16, 2.0)


@pytest.mark.parametrize(
    ("x", "message"),
    [
        (torch.randn(2, 15), r"x has shape \(2, 15\); its last dimension must be the hidden size, 16"),
        (torch.tensor(1.0), r"x has shape \(\)"),
        (torch.randn(2, 16).bfloat16(), "dtypes torch.bfloat16, torch.float32; x and the weights must have one of"),
        (torch.ones(2, 16, dtype=torch.int64), "dtypes torch.float32, torch.int64; x and the weights"),
    ],
)
def test_a_wrong_input_is_named(x, message):
    with pytest.raises(ValueError, match=message):
        MemoryOptimizedSwigluMLP(16, 48, 0)(x)


def test_weights_that_do_not_fit_are_named():
    weights = (torch.randn(shape) for shape in ((4, 6), (4, 7), (6, 4)))
    with pytest.raises(ValueError, match=r"V \(4, 7\).*must be \(hidden, intermediate\)"):
        MemoryOptimizedSwigluMLPFunction.apply(torch.randn(2, 4), *weights, 0)
