"""Every backend computes what eager does, or says in a line why it doesn't."""

import copy

import pytest
import torch
from torch import nn

from helpers.chapters.compilers import workloads
from helpers.compilers import build, missing_because, runtimes
from helpers.compilers.backends import (
    CHANNELS_LAST,
    COMPILE,
    EAGER,
    ONNX,
    OPENVINO,
    OVERHEAD,
    SCRIPT,
    TENSORRT,
    TRACE,
    agree_within,
    version,
)
from helpers.compilers.messages import ExportFailed
from helpers.lab import machine
from helpers.lab.timing import relative_error, tensors

CPU, CUDA = torch.device("cpu"), torch.device("cuda")


def agrees(backend, model, example, other, folder):
    """Whether a backend built with an example returns on another what eager does."""
    if reason := missing_because(backend, CPU):
        pytest.skip(reason)
    run = build(backend, copy.deepcopy(model), example, folder)
    with torch.inference_mode():
        expected, outputs = tensors(model(*other)), tensors(run(*other))
    assert [each.shape for each in outputs] == [each.shape for each in expected]
    return all(relative_error(a, b) <= agree_within(backend, b.dtype) for a, b in zip(outputs, expected, strict=True))


@pytest.fixture
def halves():
    """Of a batch of the tiny BERT's inputs."""
    (inputs,) = workloads.example(workloads.TINY_BERT, 4)
    return (inputs[:2],), (inputs[2:],)


@pytest.mark.parametrize("backend", [TRACE, SCRIPT])
def test_a_backend_agrees_with_eager_on_inputs_that_it_was_not_built_with(backend, halves, tmp_path):
    assert agrees(backend, workloads.network(workloads.TINY_BERT), *halves, tmp_path)


def test_channels_last_agrees_with_eager(tmp_path):
    model, images = workloads.network(workloads.TINY_RESNET), workloads.example(workloads.TINY_RESNET, 2)
    assert agrees(CHANNELS_LAST, model, images, images, tmp_path)


def test_the_runtimes_of_an_onnx_file_agree_with_eager(halves, tmp_path, monkeypatch):
    if reason := missing_because(ONNX, CPU) or missing_because(OPENVINO, CPU):
        pytest.skip(reason)
    model = workloads.network(workloads.TINY_BERT)
    file = runtimes.to_onnx(model, halves[0], tmp_path)
    monkeypatch.setattr(runtimes, "to_onnx", lambda *_: file)  # it takes seconds
    assert agrees(ONNX, model, *halves, tmp_path) and agrees(OPENVINO, model, *halves, tmp_path)


@torch.library.custom_op("helpers_test::odd", mutates_args=())
def odd(x: torch.Tensor) -> torch.Tensor:
    return x + 1


@odd.register_fake
def _(x):
    return torch.empty_like(x)


class Odd(nn.Module):
    def forward(self, x):
        return odd(x.relu()) * 2


def test_an_export_that_fails_names_the_operation(tmp_path):
    if reason := missing_because(ONNX, CPU):
        pytest.skip(reason)
    with pytest.raises(ExportFailed, match=r"failed: No ONNX function found") as failure:
        build(ONNX, Odd().eval(), (torch.randn(3, 4),), tmp_path)
    assert "\n" not in str(failure.value)


@pytest.mark.parametrize(
    ("installed", "device", "reasons"),
    [
        ("", CPU, {EAGER: "", OVERHEAD: "needs CUDA", TENSORRT: "needs CUDA", COMPILE: "not installed: C++ compiler"}),
        ("C++ compiler", CPU, {COMPILE: "not installed: Python.h"}),
        ("C++ compiler, Python.h", CUDA, {COMPILE: "not installed: triton", OPENVINO: "runs on the CPU only"}),
        ("onnx, onnxscript, onnxruntime", CUDA, {ONNX: "runs on the CPU only"}),
        ("", CUDA, {TENSORRT: "not installed: torch_tensorrt"}),
        ("torch_tensorrt", CUDA, {TENSORRT: ""}),
    ],
)
def test_what_needs_another_device_or_a_package_says_so(installed, device, reasons, monkeypatch):
    monkeypatch.setattr(machine, "installed", lambda name: "1" if name in installed.split(", ") else None)
    assert {backend: missing_because(backend, device) for backend in reasons} == reasons


def test_wrong_arguments_are_named():
    with pytest.raises(ValueError, match="TensorRT: needs CUDA"):
        build(TENSORRT, nn.ReLU(), (torch.randn(2, 3),), ".")
    with pytest.raises(ValueError, match="backend is 'magic'; valid: 'eager', 'eager, channels last'"):
        missing_because("magic", CPU)


def test_a_row_names_the_release_that_its_backend_depends_on(monkeypatch):
    monkeypatch.setattr(machine, "installed", lambda name: "1.5")
    assert (version(ONNX), version(EAGER)) == ("onnxruntime 1.5", f"torch {torch.__version__}")
