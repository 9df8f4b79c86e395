"""Every backend computes what eager does, or says in a line why it doesn't."""

import contextlib
import copy
import warnings

import pytest
import torch
from torch import nn

from helpers.compilers import BACKENDS, build, missing_because, runtimes
from helpers.compilers.backends import (
    AOT,
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
    prepare,
    version,
)
from helpers.compilers.messages import ExportFailed
from helpers.experiments.compilers import workloads
from helpers.lab import machine
from helpers.lab.timing import relative_error, tensors

CPU, CUDA = torch.device("cpu"), torch.device("cuda")


@pytest.fixture(autouse=True)
def _warm_cache(monkeypatch):
    """Torch's headers are compiled once and not for each test."""
    monkeypatch.setattr(runtimes, "empty_cache", lambda folder: contextlib.nullcontext())


def agrees(backend, model, example, other, folder):
    """Whether a backend built with an example returns on another what eager does."""
    if reason := missing_because(backend, CPU):
        pytest.skip(reason)
    run = build(backend, copy.deepcopy(model), example, folder)
    with torch.inference_mode():
        expected, outputs = tensors(model(*other)), tensors(run(*other))
    assert [each.shape for each in outputs] == [each.shape for each in expected]
    return all(relative_error(a, b) <= agree_within(backend, b.dtype) for a, b in zip(outputs, expected, strict=True))


@pytest.mark.parametrize(
    ("model", "backend"),
    [
        (workloads.TINY_RESNET, CHANNELS_LAST),
        (workloads.TINY_RESNET, TRACE),
        (workloads.TINY_RESNET, OPENVINO),
        (workloads.TINY_BERT, SCRIPT),
        (workloads.TINY_BERT, ONNX),
    ],
)
def test_a_backend_agrees_with_eager_on_inputs_that_it_was_not_built_with(model, backend, tmp_path):
    network, example = workloads.network(model), workloads.example(model, 2)
    assert agrees(backend, network, example, workloads.example(model, 2, seed=5), tmp_path)


def test_code_compiled_ahead_of_time_agrees_with_eager(tmp_path):
    assert agrees(AOT, nn.GELU(), (torch.randn(2, 8),), (torch.randn(2, 8),), tmp_path)


def test_a_backend_without_batch_norms_would_disagree():
    """The models' norms do something: without them the outputs are outside every bound."""
    model, (images,) = workloads.network(workloads.TINY_RESNET), workloads.example(workloads.TINY_RESNET, 2)
    without = copy.deepcopy(model)
    for module in without.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.reset_running_stats()
    assert relative_error(without(images), model(images)) > 10 * max(b.tolerance for b in BACKENDS.values())


@torch.library.custom_op("helpers_test::odd", mutates_args=())
def odd(x: torch.Tensor) -> torch.Tensor:
    return x + 1


@odd.register_fake
def _(x):
    return torch.empty_like(x)


class Odd(nn.Module):
    def forward(self, x):
        return odd(x.relu()) * 2


class Branches(nn.Module):
    def forward(self, x):
        if x.sum() > 0:
            return x
        return x * 2


def test_an_export_that_fails_names_the_operation(tmp_path):
    if reason := missing_because(ONNX, CPU):
        pytest.skip(reason)
    with pytest.raises(ExportFailed, match=r"failed: No ONNX function found") as failure:
        build(ONNX, Odd().eval(), (torch.randn(3, 4),), tmp_path)
    assert "\n" not in str(failure.value)


def test_only_torchscripts_own_warning_is_hidden():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        runtimes.scripted(nn.ReLU())
        with pytest.raises(ExportFailed, match="Converting a tensor to a Python boolean"):  # a TracerWarning, as error
            runtimes.traced(Branches(), (torch.randn(3),))
        with pytest.warns(DeprecationWarning, match="another"), runtimes.without_deprecation():
            warnings.warn("another", DeprecationWarning, stacklevel=1)


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
    with pytest.raises(ValueError, match=r"takes pictures \(B, C, H, W\); the input has shape \(2, 3\)"):
        prepare(CHANNELS_LAST, nn.ReLU(), (torch.randn(2, 3),), ".")
    with pytest.raises(ValueError, match="TensorRT: needs CUDA"):
        prepare(TENSORRT, nn.ReLU(), (torch.randn(2, 3),), ".")
    with pytest.raises(ValueError, match="backend is 'magic'; valid: 'eager', 'eager, channels last'"):
        missing_because("magic", CPU)


def test_a_row_names_the_release_that_its_backend_depends_on(monkeypatch):
    monkeypatch.setattr(machine, "installed", lambda name: "1.5")
    assert (version(ONNX), version(EAGER)) == ("onnxruntime 1.5", f"torch {torch.__version__}")
