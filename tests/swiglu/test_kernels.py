"""The Triton kernels, run by Triton's interpreter on the CPU, against plain torch."""

import gc
from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

pytest.importorskip("triton")

from helpers.chapters.swiglu import derived_costs as costs
from helpers.lab import peak_memory
from helpers.lab.timing import relative_error
from helpers.swiglu import LEVELS, MemoryOptimizedSwigluMLP, SwigluMLP, elementwise, steps, triton_kernels
from helpers.swiglu.elementwise import GROUP

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="tests/gpu runs the kernels themselves")

# The interpreter rounds to bf16 towards zero, a GPU to nearest.
DTYPES = {torch.float32: 1e-6, torch.float16: 1e-3, torch.bfloat16: 1.6e-2}
SIZES = st.integers(0, 3 * triton_kernels.BLOCK)


def tensors(elements, dtype, count):
    return [torch.randn(elements).mul(2).to(dtype) for _ in range(count)]


def assert_same(result, expected, tolerance):
    for ours, theirs in zip(result, expected, strict=True):
        assert ours.dtype == theirs.dtype
        assert ours.shape == theirs.shape
        assert relative_error(ours, theirs) <= tolerance


@pytest.mark.parametrize("dtype", DTYPES)
@settings(max_examples=4, deadline=None)
@given(elements=SIZES)
def test_forward(dtype, elements):
    g, u = tensors(elements, dtype, 2)
    z = elementwise.activate(g, u)
    assert_same([triton_kernels.activate(g, u)], [z], DTYPES[dtype])
    assert_same(triton_kernels.activate_keeping(g, u), elementwise.activate_keeping(g, u), DTYPES[dtype])
    over = g.clone()
    result = triton_kernels.activate(over, u, overwrite=True)
    assert result is over
    assert_same([result], [z], DTYPES[dtype])


@pytest.mark.parametrize("dtype", DTYPES)
@settings(max_examples=6, deadline=None)
@given(overwrite=st.booleans(), elements=SIZES)
def test_backward(dtype, overwrite, elements):
    dz, g, u = tensors(elements, dtype, 3)
    s = elementwise.activate_keeping(g, u)[0]
    for saved in (None, s):
        expected = elementwise.differentiate(dz.clone(), g, u, s=saved)
        copies = [tensor.clone() for tensor in (g, u)]
        result = triton_kernels.differentiate(dz.clone(), *copies, overwrite, saved)
        assert_same(result, expected, DTYPES[dtype])
        assert (result[0] is copies[0] and result[1] is copies[1]) == overwrite
        assert overwrite or all(map(torch.equal, copies, (g, u)))


@pytest.mark.parametrize("dtype", DTYPES)
@settings(max_examples=4, deadline=None)
@given(elements=SIZES)
def test_8_bits(dtype, elements):
    dz, g, u = tensors(elements, dtype, 3)
    z, kept = elementwise.activate_packing(g, u)
    over = g.clone()
    found_z, found_kept = triton_kernels.activate_packing(over, u, overwrite=True)
    assert found_z is over
    assert_same([found_z, triton_kernels.activate_packing(g, u)[0]], [z, z], DTYPES[dtype])
    for ours, theirs in zip(found_kept, kept, strict=True):
        torch.testing.assert_close(ours, theirs, atol=1 if ours.dtype == torch.int8 else 0, rtol=1e-6)
    result = triton_kernels.differentiate_packed(dz.clone(), kept)
    assert_same(result, elementwise.differentiate_packed(dz.clone(), kept), DTYPES[dtype])


@settings(max_examples=20, deadline=None)
@given(elements=st.integers(0, 5 * GROUP), scale=st.floats(1e-20, 1e20), seed=st.integers(0, 100))
def test_packing_is_off_by_half_a_step_at_most(elements, scale, seed):
    values = torch.randn(elements, generator=torch.Generator().manual_seed(seed)) * scale
    _, (packed, _, scales, _) = elementwise.activate_packing(values, values)
    step = scales.repeat_interleave(GROUP)[:elements]
    assert packed.dtype == torch.int8
    assert bool(((packed * step - values).abs() <= step * 0.5001).all())


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # the interpreter's numpy, on these very values
@pytest.mark.parametrize("bad", [float("inf"), float("-inf"), float("nan")])
@pytest.mark.parametrize("kernels", [elementwise, triton_kernels])
def test_what_is_not_finite_is_not_hidden_by_8_bits(kernels, bad):
    g, u = torch.randn(2 * GROUP), torch.randn(2 * GROUP)
    g[3] = bad
    _, kept = kernels.activate_packing(g, u)
    dg, du, z = kernels.differentiate_packed(torch.ones(2 * GROUP), kept)
    assert not torch.isfinite(dg[:GROUP]).any() or not torch.isfinite(du[:GROUP]).any()
    for gradient in (dg, du, z):
        assert torch.isfinite(gradient[GROUP:]).all()


@pytest.fixture
def interpreted(monkeypatch):
    """The whole layer on the interpreted kernels. The interpreter's reference cycles are collected at once."""
    launch = triton_kernels._launch

    def launch_and_collect(*arguments, **constants):
        launch(*arguments, **constants)
        gc.collect(1)

    monkeypatch.setattr(triton_kernels, "_launch", launch_and_collect)
    monkeypatch.setattr(steps, "kernels_for", lambda tensor: triton_kernels)


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("retain", [False, True])
def test_the_layer_on_kernels_equals_the_plain_module(interpreted, level, retain):
    reference = SwigluMLP(24, 80)
    layer = MemoryOptimizedSwigluMLP.from_plain(reference, level)
    x, l = torch.randn(7, 24, requires_grad=True), torch.randn(7, 24)
    expected = torch.autograd.grad(reference(x), [x, reference.U.weight], l)
    y = layer(x)
    for _ in range(2 if retain else 1):
        dx, dU = torch.autograd.grad(y, [x, layer.U], l, retain_graph=retain)
    assert relative_error(dx, expected[0]) < (2e-2 if level == 3 else 1e-5)
    assert relative_error(dU.t(), expected[1]) < (2e-2 if level == 3 else 1e-5)


@pytest.mark.parametrize("level", LEVELS)
def test_selective_checkpointing_that_holds_products_gets_them_unchanged(interpreted, level):
    reference = SwigluMLP(24, 80)
    layer = MemoryOptimizedSwigluMLP.from_plain(reference, level)
    x, l = torch.randn(7, 24, requires_grad=True), torch.randn(7, 24)

    def keep_products(context, function, *arguments, **options):
        keep = function is torch.ops.aten.mm.default
        return CheckpointPolicy.MUST_SAVE if keep else CheckpointPolicy.PREFER_RECOMPUTE

    y = checkpoint(
        layer, x, use_reentrant=False, context_fn=partial(create_selective_checkpoint_contexts, keep_products)
    )
    result = torch.autograd.grad(y, [x, layer.W, layer.V, layer.U], l)
    expected = torch.autograd.grad(layer(x), [x, layer.W, layer.V, layer.U], l)
    for ours, theirs in zip(result, expected, strict=True):
        assert relative_error(ours, theirs) < 1e-5


@pytest.mark.parametrize("level", [0, 2])
def test_whoever_still_needs_what_backward_wrote_over_is_told(interpreted, level):
    layer = MemoryOptimizedSwigluMLP(24, 80, level)
    bytes_held = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: bytes_held.append(t) or t, lambda t: t):
        y = layer(torch.randn(7, 24, requires_grad=True))
    versions = [t._version for t in bytes_held]
    y.sum().backward()
    assert sum(t._version > before for t, before in zip(bytes_held, versions, strict=True)) >= 2


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize(("tokens", "hidden", "intermediate", "layers"), [(64, 32, 256, 1), (5, 7, 11, 3)])
def test_the_peak_is_the_predicted_one_to_the_byte(interpreted, level, tokens, hidden, intermediate, layers):
    stack = torch.nn.Sequential(*(MemoryOptimizedSwigluMLP(hidden, intermediate, level) for _ in range(layers)))
    x, l = torch.randn(tokens, hidden, requires_grad=True), torch.randn(tokens, hidden)

    def step():
        y = stack(x)
        y.backward(l)

    step()  # from now on there are gradients to add to
    predicted = costs.peak_bytes(level, tokens, hidden, intermediate, layers, 4)
    assert peak_memory(step).added_bytes == predicted
