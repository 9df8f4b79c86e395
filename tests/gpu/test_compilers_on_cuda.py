"""Backends, latencies and training on a GPU: what only shows there."""

import pytest

from helpers.chapters.compilers import workloads
from helpers.chapters.compilers.latency import measure_latency
from helpers.chapters.compilers.training import measure_training
from helpers.compilers import missing_because
from helpers.compilers.backends import AOT, COMPILE, ONNX, OVERHEAD, TENSORRT, TRACE


def row_of(measure, model, backend, batch, **settings):
    if reason := missing_because(backend):
        pytest.skip(reason)
    row = measure(model, batch, [backend], seconds=0.2, **settings)[-1]
    assert "status" not in row, row
    return row


IN_FP32 = [(backend, "fp32") for backend in (TRACE, COMPILE, OVERHEAD, AOT, ONNX, TENSORRT)]


@pytest.mark.parametrize(("backend", "precision"), [*IN_FP32, (COMPILE, "fp16"), (COMPILE, "bf16")])
@pytest.mark.parametrize("model", [workloads.TINY_RESNET, workloads.TINY_BERT])
def test_every_backend_agrees_with_eager(model, backend, precision):
    assert row_of(measure_latency, model, backend, 2, precision=precision)["median_ms"] > 0


@pytest.mark.alone
def test_recorded_launches_answer_sooner_than_eager_ones():
    assert row_of(measure_latency, workloads.TINY_BERT, OVERHEAD, 1)["speedup"] > 1.3


@pytest.mark.parametrize("backend", [TRACE, COMPILE, OVERHEAD])
@pytest.mark.parametrize("model", [workloads.TINY_RESNET, workloads.TINY_BERT])
def test_training_in_bf16_learns_as_eager_does(model, backend):
    assert row_of(measure_training, model, backend, 4, precision="bf16")["median_ms"] > 0
