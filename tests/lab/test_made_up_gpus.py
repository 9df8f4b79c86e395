"""What is said of GPUs that are not at hand: their class, the types that they multiply, whether torch has kernels."""

import pytest
import torch

from helpers.__main__ import main
from helpers.lab import DeviceError, device, half_dtype, machine
from helpers.lab.machine import device_class, missing_because, without_kernels
from helpers.training import stages


@pytest.mark.parametrize(("gib", "name"), [(7.6, "gpu"), (15.8, "gpu"), (79.1, "big-gpu")])
def test_the_class_follows_the_memory(gib, name, made_up_gpu):
    made_up_gpu(gib=gib)
    assert device_class() == name


@pytest.mark.parametrize(
    ("capability", "dtype", "precision"),
    [((7, 5), torch.float16, "dynamic"), ((8, 0), torch.bfloat16, "bf16"), ((12, 0), torch.bfloat16, "bf16")],
)
def test_bf16_is_for_gpus_that_multiply_it_natively(capability, dtype, precision, made_up_gpu):
    made_up_gpu(capability, built=("sm_75", "sm_80", "sm_120"))
    assert half_dtype() == dtype
    assert stages.mixed_precision().name == precision
    assert bool(missing_because("native bf16")) == (dtype == torch.float16)


def test_a_cpu_counts_as_having_bf16():
    assert not torch.cuda.is_available() or half_dtype()
    assert missing_because("native bf16", device=torch.device("cpu")) == ""


@pytest.mark.parametrize(
    ("capability", "built", "runs"),
    [
        ((8, 6), ("sm_80",), True),  # machine code of a lower minor version
        ((9, 0), ("sm_80",), False),  # and not of another major version,
        ((9, 0), ("sm_80", "compute_80"), True),  # unless as PTX
        ((6, 1), ("sm_75", "sm_80"), False),
        ((8, 0), ("sm_86",), False),
        ((12, 0), ("sm_90", "sm_120a"), True),
        ((9, 4), ("gfx942",), True),  # ROCm's names tell nothing of this
    ],
)
def test_a_gpu_runs_what_was_compiled_for_it(capability, built, runs, made_up_gpu):
    made_up_gpu(capability, built=built)
    assert (without_kernels() == "") == runs


def test_a_gpu_without_kernels_is_said_plainly(made_up_gpu, capsys, monkeypatch, tmp_path):
    made_up_gpu((6, 1), built=("sm_75", "sm_90"))
    with pytest.raises(DeviceError, match=r"no kernels for compute capability 6\.1, only for sm_75, sm_90"):
        device()
    assert main(["measure", "amp/zeros", "--results", str(tmp_path)]) == 1
    assert "NVIDIA Made-up: torch" in capsys.readouterr().err
    monkeypatch.setattr(torch.backends.cudnn, "version", lambda: 1)
    assert main(["doctor", "--results", str(tmp_path)]) == 0
    assert "unusable: NVIDIA Made-up" in capsys.readouterr().out


def test_doctor_names_an_apple_gpu(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: True)
    assert main(["doctor", "--results", str(tmp_path)]) == 0
    assert "Apple GPU" in capsys.readouterr().out


def test_the_made_up_gpu_is_gone():
    assert machine.device_name()  # torch's own answers are back
