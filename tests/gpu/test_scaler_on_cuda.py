"""The scalers on a GPU: equal to torch's, never waiting, capturable in a CUDA graph."""

import math

import pytest
import torch

from helpers.amp import DynamicGradScaler


def model():
    generator = torch.Generator("cuda").manual_seed(0)
    parameters = [torch.randn(size, device="cuda", generator=generator).requires_grad_() for size in (1000, 37)]
    return parameters, torch.optim.AdamW(parameters, lr=0.01, fused=True, capturable=True)


def set_gradients(scaler, parameters, step):
    bad = step % 5 == 4
    loss = sum((p * math.sin(step + 1)).sum() for p in parameters) * (math.inf if bad else 1.0)
    scaler.scale(loss).backward()


def test_equals_torchs_scaler_bit_for_bit():
    arguments = {"init_scale": 2.0**10, "growth_interval": 3}
    runs = [
        (scaler, *model()) for scaler in (DynamicGradScaler(**arguments), torch.amp.GradScaler("cuda", **arguments))
    ]
    for step in range(200):
        for scaler, parameters, optimizer in runs:
            optimizer.zero_grad()
            set_gradients(scaler, parameters, step)
            scaler.step(optimizer)
            scaler.update()
        assert runs[0][0].get_scale() == runs[1][0].get_scale()
    for a, b in zip(runs[0][1], runs[1][1], strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("clip", [False, True])
def test_a_step_never_waits_for_the_gpu(clip, no_waiting):
    scaler = DynamicGradScaler()
    parameters, optimizer = model()

    def step():
        optimizer.zero_grad()
        set_gradients(scaler, parameters, 0)
        if clip:
            scaler.clip_grad_norm_(optimizer, 1.0)
        scaler.step(optimizer)
        scaler.update()

    step()
    no_waiting()
    for _ in range(3):
        step()


def test_a_captured_step_goes_on_scaling_when_it_is_replayed():
    parameters, optimizer = model()
    scaler = DynamicGradScaler(init_scale=2.0**10, growth_interval=2)
    factor = torch.ones((), device="cuda")
    for parameter in parameters:
        parameter.grad = torch.zeros_like(parameter)

    def step():
        for parameter in parameters:
            parameter.grad.zero_()
        scaler.scale(sum((p * factor).sum() for p in parameters)).backward()
        scaler.clip_grad_norm_(optimizer, 1.0)
        scaler.step(optimizer)
        scaler.update()

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(stream)
    scale, before = scaler.get_scale(), [p.detach().clone() for p in parameters]
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    factor.fill_(math.inf)
    graph.replay()
    assert scaler.get_scale() == scale / 2
    assert all(torch.equal(a, b) for a, b in zip(parameters, before, strict=True))
    factor.fill_(1.0)
    graph.replay()
    assert not torch.equal(parameters[0], before[0])


def test_an_optimizer_that_is_not_fused_is_refused_inside_a_capture():
    parameters, _ = model()
    optimizer = torch.optim.AdamW(parameters, foreach=True, capturable=True)
    scaler = DynamicGradScaler()
    set_gradients(scaler, parameters, 0)
    with pytest.raises(RuntimeError, match="fused=True"), torch.cuda.graph(torch.cuda.CUDAGraph()):
        scaler.step(optimizer)
    scaler.step(optimizer)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@pytest.mark.parametrize("clip", [False, True])
def test_parameters_on_two_gpus_take_a_step_or_none_together(clip):
    parameters = [torch.ones(5, device=f"cuda:{i}", requires_grad=True) for i in range(2)]
    optimizer = torch.optim.AdamW(parameters, lr=0.1, fused=True)
    scaler = DynamicGradScaler(init_scale=8.0)
    for factor in (math.inf, 1.0):
        optimizer.zero_grad()
        scaler.scale((parameters[0].sum() + parameters[1].sum().to("cuda:0")) * factor).backward()
        norm = scaler.clip_grad_norm_(optimizer, 1.0) if clip else None
        scaler.step(optimizer)
        scaler.update()
        assert (scaler.get_scale(), scaler.skipped_steps()) == (4.0, 1)
        assert torch.equal(parameters[0].cpu(), parameters[1].cpu())
        assert torch.equal(parameters[0].cpu(), torch.ones(5)) == (factor == math.inf)
    assert not clip or norm.item() == pytest.approx(10**0.5)
