"""The layer on a GPU: Triton kernels against plain torch, and memory against its prediction."""

import pytest
import torch

from helpers.chapters.swiglu import derived_costs as costs
from helpers.chapters.swiglu.layers import TOLERANCE_8BIT, check_layer, train_step
from helpers.lab import peak_memory, saved_bytes
from helpers.lab.timing import check_agreement, relative_error
from helpers.swiglu import LEVELS, MemoryOptimizedSwigluMLP, SwigluMLP, elementwise

KERNEL_TOLERANCE = {torch.float32: 1e-6, torch.float16: 1e-3, torch.bfloat16: 8e-3}
SIZES = [1, 127, 128, 2048, 2049, 100_003, 8192 * 1024]


def close(result, expected, dtype):
    for ours, theirs in zip(result, expected, strict=True):
        assert ours.dtype == theirs.dtype
        assert relative_error(ours, theirs) <= KERNEL_TOLERANCE[dtype]


@pytest.mark.parametrize("elements", SIZES)
@pytest.mark.parametrize("dtype", KERNEL_TOLERANCE)
def test_kernels_equal_plain_torch(dtype, elements):
    from helpers.swiglu import triton_kernels as kernels

    dz, g, u = (torch.randn(elements, device="cuda").mul(2).to(dtype) for _ in range(3))
    close([kernels.activate(g, u)], [elementwise.activate(g, u)], dtype)
    close(kernels.activate_keeping(g, u), elementwise.activate_keeping(g, u), dtype)
    s = elementwise.activate_keeping(g, u)[0]
    for overwrite in (False, True):
        expected = elementwise.differentiate(dz.clone(), g, u)
        close(kernels.differentiate(dz.clone(), g.clone(), u.clone(), overwrite), expected, dtype)
        expected = elementwise.differentiate(dz.clone(), g, u, s=s)
        close(kernels.differentiate(dz.clone(), g.clone(), u.clone(), overwrite, s), expected, dtype)
    z, kept = elementwise.activate_packing(g, u)
    found_z, found_kept = kernels.activate_packing(g.clone(), u, overwrite=True)
    close([found_z], [z], dtype)
    for ours, theirs in zip(found_kept, kept, strict=True):
        torch.testing.assert_close(ours, theirs, atol=1 if ours.dtype == torch.int8 else 0, rtol=1e-6)
    close(kernels.differentiate_packed(dz.clone(), kept), elementwise.differentiate_packed(dz, kept), dtype)


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_a_level_equals_the_plain_module(level, dtype):
    check_layer(512, 2048, dtype, level)


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("compiled", [False, True])
def test_under_autocast_and_compile(level, compiled):
    reference = SwigluMLP(256, 1024, device="cuda")
    layer = MemoryOptimizedSwigluMLP.from_plain(reference, level)
    run = torch.compile(layer, fullgraph=True) if compiled else layer
    x = torch.randn(3, 100, 256, device="cuda", requires_grad=True)
    l = torch.randn(3, 100, 256, device="cuda", dtype=torch.bfloat16)

    def under_autocast(forward):
        def call(x):
            with torch.autocast("cuda", dtype=torch.bfloat16):
                return forward(x)

        return call

    variants = {
        "plain": train_step(under_autocast(reference), reference, x, l),
        "ours": train_step(under_autocast(run), layer, x, l),
    }
    check_agreement(variants, TOLERANCE_8BIT)


@pytest.mark.parametrize("level", LEVELS)
def test_bytes_kept_and_the_peak_are_the_predicted_ones(level):
    tokens, hidden, intermediate, layers = 4096, 1024, 4096, 3
    stack = torch.nn.Sequential(
        *(MemoryOptimizedSwigluMLP(hidden, intermediate, level, device="cuda") for _ in range(layers))
    )
    x = torch.randn(tokens, hidden, device="cuda", requires_grad=True)
    l = torch.randn(tokens, hidden, device="cuda")

    def step():
        y = stack(x)
        y.backward(l)

    step()
    kept = saved_bytes(lambda: stack(x), without=stack.parameters())
    assert kept == layers * costs.saved_bytes(level, tokens, hidden, intermediate, 4)
    predicted = costs.peak_bytes(level, tokens, hidden, intermediate, layers, 4)
    assert peak_memory(step).added_bytes == pytest.approx(predicted, rel=0.01)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_kernels_run_on_the_tensors_device_and_not_on_the_current_one():
    check = MemoryOptimizedSwigluMLP(64, 256, 2, device="cuda:1")
    x = torch.randn(10, 64, device="cuda:1", requires_grad=True)
    check(x).sum().backward()
    assert torch.isfinite(x.grad).all()
