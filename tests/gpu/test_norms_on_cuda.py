"""Our norms on a GPU: against torch's own, compiled, and at the bandwidth they are made for."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from helpers.kernels import layer_norm, rms_norm
from helpers.kernels import swaps as norms
from helpers.lab import bench, peak_memory
from helpers.lab.ceilings import copy

pytest.importorskip("triton")

TOLERANCE = {torch.float32: 2e-6, torch.float16: 1e-3, torch.bfloat16: 8e-3}
ROWS_AND_WIDTH = [(1, 1), (777, 255), (16384, 2048), (257, 8192), (129, 16384), (9, 20000)]


def normal(*shape, dtype=torch.float32, learns=True):
    return torch.randn(shape, device="cuda").to(dtype).requires_grad_(learns)


def same(actual, expected, tolerance):
    for a, b in zip(actual, expected, strict=True):
        assert a.shape == b.shape
        assert (a.double() - b.double()).norm() <= tolerance * max(b.double().norm(), b.numel() ** 0.5)


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("kind", norms.KINDS)
@pytest.mark.parametrize(("rows", "width"), ROWS_AND_WIDTH)
def test_norms_are_those_of_fp64(kind, rows, width, dtype):
    x, dy = (normal(rows, width, dtype=dtype) for _ in range(2))
    affine = [normal(width, dtype=dtype) for _ in range(2 if kind == "layer" else 1)]

    def reference(x, *affine):
        if kind == "layer":
            return F.layer_norm(x, (width,), *affine)
        return F.rms_norm(x, (width,), *affine, eps=torch.finfo(torch.float32).eps)

    wide = [t.detach().double().requires_grad_() for t in (x, *affine)]
    expected = reference(*wide)
    gradients = torch.autograd.grad(expected, wide, dy.double())
    y = (layer_norm if kind == "layer" else rms_norm)(x, *affine)
    same([y], [expected], TOLERANCE[dtype])
    same(torch.autograd.grad(y, [x, *affine], dy.detach()), gradients, 4 * TOLERANCE[dtype])


def test_a_norms_gradient_is_the_same_on_every_run():
    x, weight, dy = normal(5000, 1024), normal(1024), normal(5000, 1024, learns=False)
    actual = [torch.autograd.grad(rms_norm(x, weight), [x, weight], dy) for _ in range(2)]
    assert all(torch.equal(a, b) for a, b in zip(*actual, strict=True))


def test_a_transformers_decoder_under_autocast_takes_less_memory_with_fused_norms():
    layer = nn.TransformerDecoderLayer(512, 8, 2048, dropout=0.0, batch_first=True)
    model = nn.TransformerDecoder(layer, 4).cuda()
    x, memory = normal(16, 256, 512), normal(16, 256, 512)

    def step():
        with torch.autocast("cuda", dtype=torch.bfloat16):
            model(x, memory).float().square().mean().backward()

    peaks = []
    for to in ("torch", "triton"):
        assert norms.swap_norms(model, to) == 12
        step()
        peaks.append(peak_memory(step).added_bytes)
    assert peaks[1] < peaks[0]


def test_a_compiled_graph_gives_the_same():
    weight, x = normal(256), normal(64, 256)

    def step(x):
        return layer_norm(rms_norm(x + x.sin(), weight)) * 2

    expected, actual = step(x), torch.compile(step, fullgraph=True)(x)
    same([actual], [expected], 1e-5)
    upstream = torch.randn_like(expected)
    same(torch.autograd.grad(actual, x, upstream), torch.autograd.grad(expected, x, upstream), 1e-4)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_kernels_run_on_the_tensors_device_and_not_on_the_current_one():
    x = torch.randn(10, 64, device="cuda:1", requires_grad=True)
    layer_norm(x).square().sum().backward()
    assert torch.isfinite(x.grad).all()


def in_a_graph(fn):
    """`fn` recorded, so that a replay has no Python between its kernels."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            fn()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        fn()
    return graph.replay


@pytest.mark.skipif(torch.cuda.is_available() and torch.cuda.get_device_capability() < (9, 0), reason="made for Hopper")
@pytest.mark.parametrize("kind", norms.KINDS)
def test_norms_reach_65_percent_of_the_copy_bandwidth(kind):
    _, limit = copy(1024)
    x, dy = normal(16384, 2048, dtype=torch.bfloat16), normal(16384, 2048, dtype=torch.bfloat16, learns=False)
    affine = [normal(2048, dtype=torch.bfloat16) for _ in range(2 if kind == "layer" else 1)]
    normalise = norms.norm(norms.OURS, kind)
    step = in_a_graph(lambda: torch.autograd.grad(normalise(x, *affine), [x, *affine], dy))
    rate = sum(norms.least_bytes(x.numel(), 2)) / bench(step).median_ms / 1e6
    assert rate >= 0.65 * limit
