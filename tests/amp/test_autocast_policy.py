"""The result types under `Autocast` are those under torch.autocast, or the difference is listed with its reason."""

import contextlib

import pytest
import torch
from autocast_cases import (
    AN_ERROR,
    CASES,
    DIFFERENT,
    FAKES_CANNOT_RUN,
    FAKES_HIDE,
    NOT_TOLD,
    ON_A_GPU,
    result_types,
    torch_autocast,
)
from torch._subclasses import FakeTensorMode

from helpers.amp import Autocast
from helpers.amp import autocast_policy as policy

KINDS = [
    ("cpu", torch.bfloat16, None),
    ("cpu", torch.float16, "cpu"),
    ("cuda", torch.float16, None),
    ("cuda", torch.bfloat16, "cuda"),
]


def inputs(low):
    return [(torch.float32,), (low,), (low, torch.float32), (torch.float32, low), (torch.float64,)]


def tensors_for(device):
    """Fake tensors know their types and their device, and need no GPU."""
    return FakeTensorMode(allow_non_fake_inputs=True) if device == "cuda" else contextlib.nullcontext()


@pytest.mark.parametrize(("device", "low", "device_type"), KINDS)
def test_result_types_are_those_of_torch_autocast(device, low, device_type):
    different, not_told = set(), set()
    theirs = CASES if device == "cpu" else CASES | ON_A_GPU
    for name, case in CASES.items():
        for types in inputs(low):
            with tensors_for(device):
                torch.manual_seed(0)
                expected = result_types(theirs[name], types, device, torch_autocast(device, low))
                ours = result_types(case, types, device, Autocast(low, device_type=device_type))
            if NOT_TOLD in (ours, expected):
                not_told.add(name)
            elif ours != expected:
                different.add(name)
    cannot, hidden = (set(), set()) if device == "cpu" else (FAKES_CANNOT_RUN, FAKES_HIDE)
    assert not_told <= cannot
    assert different == set(DIFFERENT[device]) - not_told - hidden


def test_every_case_has_types_to_compare():
    """An error under both of them would pass for equal types."""
    for name, case in CASES.items():
        assert result_types(case, (torch.float32,), "cpu", contextlib.nullcontext()) != AN_ERROR, name
        assert result_types(case, (torch.float32,), "cpu", Autocast(torch.bfloat16)) != AN_ERROR, name


@pytest.mark.parametrize("case", ["cov", "corrcoef", "linalg.pinv"])
def test_a_product_hidden_in_cpp_is_what_fakes_cannot_show(case):
    """torch.autocast casts it wherever the function itself runs, as on the CPU; ours leaves it alone."""
    theirs, ours = torch_autocast("cpu", torch.bfloat16), Autocast(torch.bfloat16)
    assert result_types(CASES[case], (torch.float32,), "cpu", theirs) == [torch.bfloat16]
    assert result_types(CASES[case], (torch.float32,), "cpu", ours) == [torch.float32]
    assert case in DIFFERENT["cpu"] and case in DIFFERENT["cuda"]


def test_a_trace_is_summed_in_fp32_on_cuda():
    with FakeTensorMode(), Autocast(torch.float16):
        assert torch.full((4, 4), 2.0**15, dtype=torch.float16, device="cuda").trace().dtype == torch.float32
    with Autocast(torch.float16, device_type="cpu"):
        assert torch.full((4, 4), 2.0**15, dtype=torch.float16).trace() == 2.0**17


def test_every_difference_is_listed_with_its_reason():
    listed = policy.known_differences()
    for device, cases in DIFFERENT.items():
        devices = listed[listed.what.isin(cases.values())].groupby("what").device.first()
        assert set(devices.index) == set(cases.values())
        assert set(devices) <= {device, "both"}
    assert listed.reason.str.len().min() > 10


@pytest.mark.parametrize(("device", "key"), [("cpu", "AutocastCPU"), ("cuda", "AutocastCUDA")])
def test_the_lists_hold_every_operator_that_torch_registers(device, key):
    registered = torch._C._dispatch_get_registrations_for_dispatch_key(key)
    names = {name.removeprefix("aten::").split(".")[0] for name in registered if name.startswith("aten::")}
    assert policy.registered(device) == names
    listed = {name for names in policy._LISTS[device].values() for name in names.split()}
    assert listed >= names - {"_cudnn_rnn"}
    if torch.__version__.startswith("2.13."):
        assert listed <= names


def test_no_operator_has_two_policies():
    for device in ("cpu", "cuda"):
        lists = [*policy._LISTS[device].values(), *policy._THROUGH[device].values()]
        names = [name for names in lists for name in names.split()]
        assert len(names) == len(set(names))


def test_the_policy_is_a_table():
    table = policy.autocast_policy().set_index("operation")
    assert table.loc["linear"].tolist() == [policy.LOW, policy.LOW]
    assert table.loc["softmax"].tolist() == [policy.UNTOUCHED, policy.FP32_RESULT]
    assert table.loc["cat"].tolist() == [policy.PROMOTE, policy.UNTOUCHED]
    assert table.loc["binary_cross_entropy"].tolist() == [policy.FP32, policy.REFUSE]
    kinds = {policy.LOW, policy.FP32, policy.FP32_RESULT, policy.PROMOTE, policy.REFUSE, policy.UNTOUCHED}
    assert set(table.to_numpy().ravel()) == kinds


def test_every_listed_operator_is_found_in_python_or_is_internal():
    internal = {"grid_sampler_3d", "mkldnn_rnn_layer", "multilabel_margin_loss_forward"}
    for device in ("cpu", "cuda"):
        for name in policy.policies(device):
            if not policy.functions_of(name):
                assert name.startswith("_") or name in internal, name


def test_each_tensor_follows_its_own_device():
    with FakeTensorMode(), Autocast(torch.float16):
        on_cpu, on_gpu = torch.ones(4, 4, dtype=torch.float16), torch.ones(4, 4, dtype=torch.float16, device="cuda")
        assert on_cpu.softmax(-1).dtype == torch.float16
        assert on_gpu.softmax(-1).dtype == torch.float32


def test_another_device_is_left_alone():
    x = torch.ones(4, 4)
    with Autocast(torch.bfloat16, device_type="cuda"):
        assert (x @ x).dtype == torch.float32
        assert x.bfloat16().softmax(-1).dtype == torch.bfloat16
        assert torch.nn.functional.binary_cross_entropy(x, x) == 0


def test_mixed_halves_are_promoted_to_fp32():
    x = torch.ones(4, 4, dtype=torch.bfloat16)
    with Autocast(torch.float16):
        assert torch.cat([x, x.half()]).dtype == torch.float32


def test_a_refused_loss_says_what_to_use():
    with FakeTensorMode(), Autocast():
        x = torch.ones(4, device="cuda")
        with pytest.raises(RuntimeError, match="binary_cross_entropy_with_logits"):
            torch.nn.functional.binary_cross_entropy(x, x)
