"""Every runtime computes what eager does, or says in a line why it doesn't."""

import copy
import importlib.util
import warnings

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from helpers.compilers import inputs
from helpers.compilers.backends import (
    AOT,
    AUTOTUNE,
    CHANNELS_LAST,
    COMPILE,
    EAGER,
    ONNX,
    OPENVINO,
    OVERHEAD,
    SCRIPT,
    TENSORRT,
    TRACE,
    WAYS,
    ExportFailed,
    agree_within,
    build,
    inductor,
    largest_difference,
    obstacle,
    onnx_runtime,
    open_vino,
    prepare,
    torchscript,
    version,
)
from helpers.compilers.backends.failures import failures_named, in_a_line
from helpers.lab.timing import relative_error, tensors

CPU = torch.device("cpu")
QUICK = (EAGER, CHANNELS_LAST, TRACE, SCRIPT, ONNX, OPENVINO)


def built(way, model, example, folder):
    if reason := obstacle(way, CPU):
        pytest.skip(reason)
    return build(way, copy.deepcopy(model), example, folder, cold=False)


def assert_agrees(way, run, model, example):
    with torch.inference_mode():
        expected = tensors(model(*example))
    found = tensors(run(*example))
    assert [each.shape for each in found] == [each.shape for each in expected]
    assert all(relative_error(a, b) <= agree_within(way, b.dtype) for a, b in zip(found, expected, strict=True))


@pytest.mark.parametrize(
    ("model", "way"),
    [
        (model, way)
        for model in (inputs.TINY_RESNET, inputs.TINY_BERT)
        for way in QUICK
        if (model, way) != (inputs.TINY_BERT, CHANNELS_LAST)
    ],
)
def test_a_way_agrees_with_eager_on_inputs_that_it_was_not_built_with(model, way, tmp_path):
    network = inputs.network(model).eval()
    run = built(way, network, inputs.example(model, 2), tmp_path)
    assert_agrees(way, run, network, inputs.example(model, 2, seed=5))


@pytest.mark.parametrize("way", [COMPILE, AOT])
def test_generated_code_agrees_with_eager(way, tmp_path):
    model = nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.LayerNorm(8)).eval()
    run = built(way, model, (torch.randn(2, 8),), tmp_path)
    assert_agrees(way, run, model, (torch.randn(2, 8),))


def test_masked_text_goes_through_onnx(tmp_path):
    model = inputs.network(inputs.TINY_BERT).eval()
    tokens = torch.randint(128, (2, 6))
    mask = torch.arange(6)[None] < torch.tensor([[6], [3]])
    run = built(ONNX, model, (tokens, mask), tmp_path)
    assert_agrees(ONNX, run, model, (tokens.flip(1), mask.flip(0)))


def test_dropped_batch_norms_would_be_found_out():
    """The models' norms do something: without them the outputs are outside every bound."""
    model, (images,) = inputs.network(inputs.TINY_RESNET).eval(), inputs.example(inputs.TINY_RESNET, 2)
    without = copy.deepcopy(model)
    for module in without.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.reset_running_stats()
    assert relative_error(without(images), model(images)) > 10 * max(way.tolerance for way in WAYS.values())


def test_threads_are_as_many_as_torchs(monkeypatch):
    pytest.importorskip("onnxruntime")
    monkeypatch.setattr(torch, "get_num_threads", lambda: 3)
    assert onnx_runtime.session_options().intra_op_num_threads == 3
    assert open_vino.settings()["INFERENCE_NUM_THREADS"] == "3"


@torch.library.custom_op("helpers_test::odd", mutates_args=())
def odd(x: torch.Tensor) -> torch.Tensor:
    return x + 1


@odd.register_fake
def _(x):
    return torch.empty_like(x)


@torch.library.custom_op("helpers_test::unfakeable", mutates_args=())
def unfakeable(x: torch.Tensor) -> torch.Tensor:
    return x + 1


class Calls(nn.Module):
    def __init__(self, operation):
        super().__init__()
        self.operation = operation

    def forward(self, x):
        return self.operation(x.relu()) * 2


class Branches(nn.Module):
    def forward(self, x):
        if x.sum() > 0:
            return x
        return x * 2


class Sorts(nn.Module):
    def forward(self, x):
        order = sorted([1, 0], key=lambda i: -i)
        return x[order[0]]


@pytest.mark.parametrize(
    ("way", "model", "where"),
    [
        (ONNX, Calls(torch.ops.helpers_test.odd), "helpers_test::odd: No ONNX function found"),
        (OPENVINO, Calls(torch.ops.helpers_test.odd), "helpers_test::odd: No ONNX function found"),
        (ONNX, Calls(torch.ops.helpers_test.unfakeable), "helpers_test::unfakeable: There was no fake impl"),
        (AOT, Calls(torch.ops.helpers_test.unfakeable), "helpers_test::unfakeable: There was no fake impl"),
        (AOT, Branches(), "`if x.sum() > 0:` (test_backends.py:"),
        (SCRIPT, Sorts(), "`order = sorted([1, 0], key=lambda i: -i)` (test_backends.py:"),
    ],
)
def test_an_export_that_fails_names_the_operation_or_the_line(way, model, where, tmp_path):
    if reason := obstacle(way, CPU):
        pytest.skip(reason)
    with pytest.raises(ExportFailed) as failure:
        build(way, model.eval(), (torch.randn(3, 4),), tmp_path, cold=False)
    said = str(failure.value)
    assert f" failed at {where}" in said
    assert "\n" not in said
    assert len(said) <= 200


@pytest.mark.parametrize(
    ("message", "named"),
    [
        ("LoweringException: KeyError\n  target: aten.lu_solve.default\n  args[0]: x", "aten::lu_solve"),
        ("Fatal error: com.custom:Odd(-1) is not a registered function/op", "com.custom:Odd"),
        ("Could not find an implementation for Erf(13) node with name 'n'", "Erf"),
        ("Unknown builtin op: mylib::odd.\nCould not find any similar ops", "mylib::odd"),
    ],
)
def test_other_runtimes_words_are_understood(message, named):
    assert in_a_line("export", RuntimeError(message)).startswith(f"export failed at {named}: ")


@given(st.text(max_size=300), st.text(max_size=300))
def test_whatever_is_said_becomes_one_line(outer, inner):
    error = RuntimeError(outer)
    error.__cause__ = ValueError(inner)
    line = in_a_line("export", error)
    assert line.startswith("export failed")
    assert len(line.splitlines()) == 1
    assert len(line) <= 200


def test_memory_that_has_run_out_stays_what_it_is():
    with pytest.raises(torch.OutOfMemoryError), failures_named("export"):
        raise torch.OutOfMemoryError("CUDA out of memory")


def test_only_torchscripts_own_warning_is_kept_from_the_output():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        torchscript.scripted(nn.ReLU())
        with pytest.raises(ExportFailed, match="Converting a tensor to a Python boolean"):  # a TracerWarning, as error
            torchscript.traced(Branches(), (torch.randn(3),))
        with pytest.warns(DeprecationWarning, match="another"), torchscript.without_deprecation():
            warnings.warn("another", DeprecationWarning, stacklevel=1)


def test_a_missing_package_is_an_obstacle_and_never_imported(monkeypatch):
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *rest: None if name == "openvino" else find(name))
    assert obstacle(OPENVINO, CPU) in ("not installed: openvino", "not installed: onnx", "not installed: onnxscript")
    with pytest.raises(ValueError, match="OpenVINO: not installed: "):
        prepare(OPENVINO, nn.ReLU(), (torch.randn(3),), ".")


def test_what_needs_another_device_or_a_compiler_says_so(monkeypatch):
    assert obstacle(OVERHEAD, CPU) == obstacle(TENSORRT, CPU) == "needs CUDA"
    assert obstacle(EAGER, CPU) is None
    for lacking in ("C++ compiler", "Python.h"):
        with monkeypatch.context() as without:
            without.setattr(inductor, "installed", lambda name, lacking=lacking: None if name == lacking else "1")
            assert [obstacle(way, CPU) for way in (COMPILE, AUTOTUNE, AOT)] == [f"not installed: {lacking}"] * 3
    monkeypatch.setattr(inductor, "installed", lambda name: None if name == "triton" else "1")
    assert inductor.missing(CPU) is None
    assert inductor.missing(torch.device("cuda")) == "not installed: triton"


def test_channels_last_refuses_what_has_no_channels():
    with pytest.raises(ValueError, match=r"takes pictures \(B, C, H, W\); the input has shape \(2, 3\)"):
        prepare(CHANNELS_LAST, nn.ReLU(), (torch.randn(2, 3),), ".")


def test_an_unknown_way_names_those_there_are():
    with pytest.raises(ValueError, match="unknown way 'magic'; valid: eager; eager, channels last"):
        obstacle("magic", CPU)


@pytest.mark.parametrize("way", WAYS)
def test_bounds_widen_with_the_dtype(way):
    narrow = agree_within(way, torch.float32)
    assert 0 < narrow <= 1e-3
    assert narrow <= agree_within(way, torch.float32, tf32=True) <= agree_within(way, torch.bfloat16)
    assert version(way)


def test_the_largest_difference_is_over_all_tensors():
    one, other = (torch.zeros(2), torch.ones(3)), (torch.tensor([0.0, -2.0]), torch.ones(3))
    assert largest_difference(one, other) == 2.0
