"""The fused kernels on a GPU: against torch's own, in CUDA graphs, compiled, and at the bandwidth they are made for."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from helpers.lab import bench, peak_memory
from helpers.lab.ceilings import copy
from helpers.lab.machine import installed, missing_because
from helpers.lab.timing import check_agreement, relative_error
from helpers.rush import fused_norms as norms
from helpers.rush import optimizers
from helpers.rush.kernels import (
    AdamW,
    layer_norm,
    loss_and_gradient,
    rms_norm,
    rotate,
)

pytest.importorskip("triton")

TOLERANCE = {torch.float32: 2e-6, torch.float16: 1e-3, torch.bfloat16: 8e-3}
ROWS_AND_WIDTH = [
    (1, 1),
    (1000, 64),
    (777, 255),
    (4096, 1024),
    (3, 2048),
    (16384, 2048),
    (257, 8192),
    (129, 16384),
    (9, 20000),
]


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


@pytest.mark.parametrize("kind", norms.KINDS)
def test_every_variant_that_is_here_computes_the_same(kind):
    x, dy = normal(512, 768, dtype=torch.bfloat16), normal(512, 768, dtype=torch.bfloat16, learns=False)
    affine = [normal(768, dtype=torch.bfloat16) for _ in range(2 if kind == "layer" else 1)]

    def run(variant):
        normalise = norms.norm(variant, kind)

        def step():
            y = normalise(x, *affine)
            return [y, *torch.autograd.grad(y, [x, *affine], dy)]

        return step

    check_agreement({v: run(v) for v in norms.VARIANTS if not missing_because(*norms.needs(v))})


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


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("heads", [(32, 8, 64), (12, 12, 64), (32, 8, 128), (5, 1, 80)])
def test_rotary_embedding(dtype, heads):
    q_heads, k_heads, width = heads
    turns = torch.rand(129, width // 2, device="cuda") * 6.3
    x = normal(2, 129, q_heads + k_heads, width, dtype=dtype)

    def parts(x):
        return x[:, :, :q_heads], x[:, :, q_heads:]

    pairs = torch.complex(*x.float().chunk(2, dim=-1)) * torch.polar(torch.ones_like(turns), turns)[:, None]
    expected = parts(torch.cat((pairs.real, pairs.imag), dim=-1))
    actual = rotate(*parts(x * 1), turns.cos(), turns.sin())
    same(actual, expected, TOLERANCE[dtype])
    upstream = [torch.randn_like(t) for t in actual]
    same(
        torch.autograd.grad(actual, x, upstream),
        torch.autograd.grad(expected, x, [l.float() for l in upstream]),
        2 * TOLERANCE[dtype],
    )


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("vocabulary", [7, 50257, 128256])
def test_cross_entropy(dtype, vocabulary):
    logits, target = normal(300, vocabulary, dtype=dtype), torch.randint(0, vocabulary, (300,), device="cuda")
    target[::3] = -100
    reference = logits.detach().double().requires_grad_()
    losses, over = loss_and_gradient(logits.detach().clone(), target)
    assert relative_error(losses, F.cross_entropy(reference.detach(), target, reduction="none")) < 1e-5
    assert relative_error(over / 200, torch.autograd.grad(F.cross_entropy(reference, target), reference)[0]) < 1e-2


def test_cross_entropy_allocates_no_second_tensor_of_logits():
    logits, target = normal(2048, 32000, dtype=torch.bfloat16), torch.randint(0, 32000, (2048,), device="cuda")
    hidden = logits * 1
    used = peak_memory(lambda: loss_and_gradient(hidden, target)).added_bytes
    assert used < logits.nbytes / 100


def parameters():
    return [normal(n) for n in (1, 1000, 1024, 4097, 1_000_000, 0)] + [normal(300, 77)]


def test_adamw_is_torchs():
    start = parameters()
    gradients = [[torch.randn_like(p) for p in start] for _ in range(5)]

    def updated(variant):
        params = [p.detach().clone().requires_grad_() for p in start]
        optimizer = optimizers.build(variant, params, lr=1e-2, weight_decay=0.1)
        for given in gradients:
            for p, gradient in zip(params, given, strict=True):
                p.grad = gradient.clone()
            optimizer.step()
        return params

    expected = updated(optimizers.FOR_LOOP)
    for variant in optimizers.VARIANTS:
        if not missing_because(*optimizers.NEEDS.get(variant, ())):
            for a, b in zip(updated(variant), expected, strict=True):
                torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


def test_adamw_leaves_alone_what_lies_beside_a_tensor():
    whole = torch.randn(10_000, device="cuda")
    params = [whole[1:1030].requires_grad_(), whole[2000:4053].requires_grad_(), whole[5000:9098].requires_grad_()]
    expected = whole.detach().clone()
    for p in params:
        p.grad = torch.ones_like(p)
        begin = p.storage_offset()
        expected[begin : begin + p.numel()] -= 0.5
    AdamW(params, lr=0.5, weight_decay=0.0).step()
    torch.testing.assert_close(whole.detach(), expected)


def test_torchs_scaler_drives_adamw_without_waiting():
    ours = parameters()
    theirs = [p.detach().clone().requires_grad_() for p in ours]
    for params, optimizer in ((ours, AdamW(ours)), (theirs, torch.optim.AdamW(theirs, fused=True))):
        scaler = torch.amp.GradScaler(init_scale=8.0, growth_interval=1)
        for factor in (1.0, float("inf"), 2.0):
            optimizer.zero_grad()
            scaler.scale(sum(p.square().sum() for p in params) * factor).backward()
            torch.cuda.set_sync_debug_mode("error" if params is ours and optimizer.state else "default")
            try:
                scaler.step(optimizer)
            finally:
                torch.cuda.set_sync_debug_mode("default")
            scaler.update()
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


def test_a_training_step_with_all_of_them_in_a_cuda_graph():
    def build():
        torch.manual_seed(0)
        weights = {"x": normal(8, 32, 4 * 64), "norm": normal(256), "head": normal(1000, 256)}
        return weights, AdamW(list(weights.values()), lr=torch.tensor(1e-2, device="cuda"))

    turns = torch.rand(32, 32, device="cuda") * 6.3
    target = torch.randint(0, 1000, (8 * 32,), device="cuda")

    def step(weights, optimizer):
        optimizer.zero_grad()
        y = rms_norm(weights["x"], weights["norm"]).unflatten(-1, (4, 64))
        q, k = rotate(y[:, :, :3], y[:, :, 3:], turns.cos(), turns.sin())
        logits = torch.cat((q, k), 2).flatten(2) @ weights["head"].T
        loss = F.cross_entropy(logits.flatten(0, 1), target)
        loss.backward()
        optimizer.step()
        return loss

    weights, optimizer = build()
    expected = [step(weights, optimizer).item() for _ in range(6)]
    again, optimizer = build()
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        losses = [step(again, optimizer).item() for _ in range(2)]
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        loss = step(again, optimizer)
    for _ in range(3):
        graph.replay()
        losses.append(loss.item())
    losses.append(step(again, optimizer).item())  # and without the graph again
    assert losses == pytest.approx(expected, rel=1e-4)
    for a, b in zip(weights.values(), again.values(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-4)


def test_adamw_says_what_a_capture_needs():
    p = normal(1000)
    p.grad = torch.randn_like(p)
    optimizer = AdamW([p])
    with (
        pytest.raises(RuntimeError, match="take a step with these parameters before"),
        torch.cuda.graph(torch.cuda.CUDAGraph()),
    ):
        optimizer.step()


def test_compiled_graphs():
    weight = normal(256)

    def step(x):
        y = rms_norm(x + x.sin(), weight).unflatten(-1, (4, 64))
        q, _ = rotate(y[None, :, :3], y[None, :, 3:], turns.cos(), turns.sin())
        return layer_norm(q.flatten(), None) * 2

    turns = torch.rand(64, 32, device="cuda")
    x = normal(64, 256)
    expected, actual = step(x), torch.compile(step, fullgraph=True)(x)
    same([actual], [expected], 1e-5)
    l = torch.randn_like(expected)
    same(torch.autograd.grad(actual, x, l), torch.autograd.grad(expected, x, l), 1e-4)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_kernels_run_on_the_tensors_device_and_not_on_the_current_one():
    x = torch.randn(10, 64, device="cuda:1", requires_grad=True)
    loss_and_gradient(layer_norm(x).detach(), torch.arange(10, device="cuda:1"))
    layer_norm(x).square().sum().backward()
    AdamW([x]).step()
    assert torch.isfinite(x).all()


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


@pytest.mark.skipif(torch.cuda.is_available() and torch.cuda.get_device_capability() < (9, 0), reason="made for Hopper")
def test_adamw_reaches_90_percent_of_the_copy_bandwidth():
    _, limit = copy(1024)
    params = [normal(2048, 2048) for _ in range(50)]
    for p in params:
        p.grad = torch.randn_like(p)
    step = optimizers.build(optimizers.OURS, params).step
    rate = optimizers.LEAST_BYTES * sum(p.numel() for p in params) / bench(step).median_ms / 1e6
    assert rate >= 0.9 * limit


def test_the_project_names_what_is_installed():
    assert missing_because(*norms.needs(norms.OURS)) == ""
    assert (missing_because(*optimizers.NEEDS[optimizers.APEX]) == "") == (installed("apex") is not None)
