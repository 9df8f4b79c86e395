"""Packed attention on a GPU: compiled FlexAttention and FlashAttention's varlen kernels, and no waiting for any."""

import functools
import time

import numpy as np
import pytest
import torch
from packed_cases import VOCABULARY, alone, documents, gradients, layout_of, one_by_one, packed, summed_loss

from helpers.amp import Autocast
from helpers.batching.attention import (
    VARIANTS,
    causal_attention,
    missing_because,
    packed_attention,
    without_cudnn_attention,
)
from helpers.chapters.batching.step_times import device_ms
from helpers.lab import peak_memory
from helpers.lab.timing import relative_error
from helpers.models import GPT2LikeModel

HALVES = [torch.float16, torch.bfloat16]
TOLERANCE = {torch.float16: 4e-3, torch.bfloat16: 2e-2}
# All of one length, so that FlexAttention is compiled once; blocks of 128 are seen whole, in part and not at all.
BATCHES = [[512], [1] * 512, [300, 1, 0, 83, 128], [128] * 4, [5, 2, 400, 105]]


def need(variant, dtype):
    if reason := missing_because(variant, "cuda", dtype):
        pytest.skip(f"{variant}: {reason}")


def qkv(length, heads, kv_heads, dtype):
    options = {"device": "cuda", "dtype": dtype, "requires_grad": True}
    return [torch.randn(1, number, length, 64, **options) for number in (heads, kv_heads, kv_heads)]


@functools.cache
def model(dtype=torch.float32):
    torch.manual_seed(0)
    sizes = {"d_model": 64, "num_heads": 4, "num_layers": 2, "dropout": 0.0, "max_length": 512}
    network = GPT2LikeModel(VOCABULARY, **sizes)
    for weight in network.parameters():
        weight.data *= 8 if weight.dim() == 2 else 1  # so that what is attended to shows in the loss
    return network.cuda().to(dtype)


@pytest.mark.parametrize("kv_heads", [4, 2])
@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("variant", VARIANTS)
def test_documents_and_their_gradients_are_what_they_are_alone_in_fp32(variant, dtype, kv_heads):
    need(variant, dtype)
    for lengths in [*BATCHES, [33, 1, 66], [213, 1, 426], [333, 1, 666]]:
        inputs = qkv(sum(lengths), 4, kv_heads, dtype)
        exact = [x.detach().float().requires_grad_() for x in inputs]
        out, alone = packed_attention(layout_of(lengths), variant, "cuda")(*inputs), one_by_one(*exact, lengths)
        assert out.dtype == dtype
        assert relative_error(out, alone) < TOLERANCE[dtype], lengths
        upstream = torch.randn_like(out)
        gradients = torch.autograd.grad(out, inputs, upstream)
        expected = torch.autograd.grad(alone, exact, upstream.float())
        if max(lengths) > 1:  # of a single key the weight is 1 whatever q and k are: their gradient is rounding
            errors = map(relative_error, gradients, expected)
            assert all(error < 2 * TOLERANCE[dtype] for error in errors), lengths


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("ours", [True, False])
def test_a_packed_model_has_the_gradients_of_its_documents_alone(variant, ours):
    need(variant, torch.bfloat16)
    region = Autocast(torch.bfloat16) if ours else torch.autocast("cuda", torch.bfloat16)
    network, texts = model(), documents([60, 1, 131, 17, 200])
    expected_loss, expected = alone(network, [text.cuda() for text in texts])
    tokens, targets, positions, layout = packed(texts, padding=103)
    with region:
        attend = packed_attention(layout, variant, "cuda")
        logits = network(tokens.cuda(), positions.cuda(), attend=attend)
    loss = summed_loss(logits.float(), targets.cuda())
    assert loss.item() == pytest.approx(expected_loss.item(), rel=1e-3)
    for name, gradient in gradients(network, loss).items():
        assert (gradient - expected[name]).norm() < 0.05 * expected[name].norm() + 1e-2, name
    with region:
        leaking = network(tokens.cuda(), positions.cuda(), attend=causal_attention)
    assert summed_loss(leaking.float(), targets.cuda()).item() != pytest.approx(expected_loss.item(), rel=2e-3)


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_compiled_model_takes_other_documents_without_compiling_again(variant):
    need(variant, torch.bfloat16)
    network = model(torch.bfloat16)
    compiled = torch.compile(network, fullgraph=True)
    for number, lengths in enumerate([[512], [300, 212], [1, 511], [100] * 5 + [12]]):
        tokens, _, positions, layout = packed(documents(lengths))
        arguments = tokens.cuda(), positions.cuda(), packed_attention(layout, variant, "cuda")
        with torch._dynamo.config.patch(error_on_recompile=number > 1):  # varlen's sizes are dynamic from the second on
            result = compiled(*arguments)
        assert relative_error(result, network(*arguments)) < TOLERANCE[torch.bfloat16]
        result.float().square().mean().backward()


@pytest.mark.parametrize("variant", VARIANTS)
def test_nothing_waits_for_the_gpu(variant, no_waiting):
    """From the offsets to the gradients, batch after batch, each with other documents."""
    need(variant, torch.bfloat16)
    network = model(torch.bfloat16)

    def step(lengths):
        tokens, targets, positions, layout = packed(documents(lengths))
        attend = packed_attention(layout, variant, "cuda")
        tokens, targets, positions = (
            x.pin_memory().to("cuda", non_blocking=True) for x in (tokens, targets, positions)
        )
        summed_loss(network(tokens, positions, attend=attend), targets).backward()

    step(BATCHES[1])
    torch.cuda.synchronize()
    no_waiting()
    for lengths in BATCHES:
        step(lengths)


def test_varlen_names_what_it_needs():
    assert missing_because("dense", "cuda", torch.bfloat16) == ""
    need("varlen", torch.bfloat16)
    assert missing_because("varlen", "cuda", torch.float32) == "needs fp16 or bf16, not float32"
    attend = packed_attention(layout_of([16]), "varlen", "cuda")
    with pytest.raises(ValueError, match=r"'varlen' got torch\.float32 with head_dim 64; it takes fp16"):
        attend(*qkv(16, 2, 2, torch.float32))
    with pytest.raises(ValueError, match="head_dim 60"):
        attend(*(x[..., :60] for x in qkv(16, 2, 2, torch.float16)))


@pytest.mark.parametrize("length", [2048, 2001])
def test_densely_a_layer_more_takes_no_mask_more(length):
    attend = packed_attention(layout_of([length]), "dense", "cuda", torch.bfloat16)
    inputs, pairs = qkv(length, 1, 1, torch.bfloat16), 2 * length**2

    def layers(count):
        return [attend(*inputs) for _ in range(count)]

    with without_cudnn_attention():
        layers(1)
        few, many = (peak_memory(functools.partial(layers, count)).added_bytes for count in (2, 10))
    assert many - few < 8 * pairs / 2


def test_other_shapes_make_the_host_plan_nothing():
    with without_cudnn_attention():
        shapes = [(4, 4, length, 64) for length in range(64, 104)]
        inputs = [[torch.randn(shape, device="cuda", dtype=torch.bfloat16) for _ in range(3)] for shape in shapes]
        causal_attention(*inputs[0])
        began = time.perf_counter()
        for parts in inputs:
            causal_attention(*parts)
        torch.cuda.synchronize()
    assert (time.perf_counter() - began) / len(shapes) < 5e-3  # a plan of cuDNN's takes tens of milliseconds


def test_the_time_of_a_batch_is_the_devices_however_slow_the_host_is():
    x = torch.zeros(1000, device="cuda")

    def slowly(_):
        x.add_(1)
        time.sleep(5e-4)
        x.add_(1)

    slowly(None)
    assert np.median(device_ms(range(40), slowly)) < 0.3
