"""The tracker on a GPU: equal to the CPU's, never waiting, capturable in a CUDA graph."""

import pytest
import torch

from helpers.pipelines.forgetting import ForgettingTracker, is_correct

SAMPLES = 1000


def presentations(steps, batch=512):
    """Batches with many repeats."""
    generator = torch.Generator().manual_seed(0)
    for _ in range(steps):
        indices = torch.randint(SAMPLES, (batch,), generator=generator)
        yield indices, torch.rand(batch, generator=generator) < 0.5


@pytest.mark.parametrize("batch", [1, 64, 512, 20_000])  # short and long sorts are other kernels
def test_equals_the_cpu_with_repeats_in_a_batch(batch):
    ours, reference = ForgettingTracker(SAMPLES, "cuda"), ForgettingTracker(SAMPLES)
    for indices, correct in presentations(20, batch):
        ours.update(indices.cuda(), correct.cuda())
        reference.update(indices, correct)
    assert torch.equal(ours.state_dict()["state"], reference.state_dict()["state"])
    assert torch.equal(ours.ranking(3), reference.ranking(3))


def test_a_step_never_waits_for_the_gpu(no_waiting):
    tracker = ForgettingTracker(SAMPLES, "cuda")
    indices = torch.arange(64, device="cuda")
    logits, labels = torch.randn(64, 10, device="cuda"), torch.randint(10, (64,), device="cuda")
    tracker.update(indices, is_correct(logits, labels))
    no_waiting()
    for _ in range(3):
        tracker.update(indices, is_correct(logits, labels))


def test_a_captured_step_goes_on_counting_when_it_is_replayed():
    tracker, reference = ForgettingTracker(SAMPLES, "cuda"), ForgettingTracker(SAMPLES)
    steps = list(presentations(8))
    indices, correct = (tensor.cuda() for tensor in steps[0])
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        ForgettingTracker(SAMPLES, "cuda").update(indices, correct)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        tracker.update(indices, correct)
    for step in steps:
        indices.copy_(step[0])
        correct.copy_(step[1])
        graph.replay()
        reference.update(*step)
    assert torch.equal(tracker.state_dict()["state"], reference.state_dict()["state"])


def test_a_state_moves_between_devices():
    reference = ForgettingTracker(SAMPLES)
    for step in presentations(5):
        reference.update(*step)
    ours = ForgettingTracker(SAMPLES, "cuda")
    ours.load_state_dict(reference.state_dict())
    for indices, correct in presentations(5):
        ours.update(indices.cuda(), correct.cuda())
        reference.update(indices, correct)
    assert torch.equal(ours.state_dict()["state"], reference.state_dict()["state"])
    assert ours._state.device.type == "cuda"
