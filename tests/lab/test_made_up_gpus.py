"""What is said of GPUs that are not at hand: their class, the types that they multiply, whether torch has kernels."""

import sys

import pytest
import torch

from helpers.book import Table
from helpers.chapters import chapters, tables_of
from helpers.cli import main
from helpers.distributed import Job
from helpers.fit import rank_memory
from helpers.lab import DeviceError, device, half_dtype
from helpers.lab.ceilings import large_copy
from helpers.lab.machine import missing_because, without_kernels
from helpers.training import stages


@pytest.mark.parametrize(
    ("capability", "dtype", "precision"),
    [((7, 5), torch.float16, "dynamic"), ((8, 0), torch.bfloat16, "bf16"), ((12, 0), torch.bfloat16, "bf16")],
)
def test_bf16_is_for_gpus_that_multiply_it_natively(capability, dtype, precision, made_up_gpu):
    made_up_gpu(capability, built=("sm_75", "sm_80", "sm_120"))
    assert missing_because("native bf16", device=torch.device("cpu")) == ""  # as every CPU in tests
    assert half_dtype() == dtype
    assert stages.mixed_precision().name == precision
    assert bool(missing_because("native bf16")) == (dtype == torch.float16)


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


def test_a_gpu_without_kernels_is_said_plainly(made_up_gpu, capsys, tmp_path):
    made_up_gpu((6, 1), built=("sm_75", "sm_90"))
    with pytest.raises(DeviceError, match=r"no kernels for compute capability 6\.1, only for sm_75, sm_90"):
        device()
    assert main(["measure", "amp/exponents", "--results", str(tmp_path)]) == 1
    assert "NVIDIA Made-up: torch" in capsys.readouterr().err
    assert main(["doctor", "--results", str(tmp_path)]) == 0
    assert "unusable: NVIDIA Made-up" in capsys.readouterr().out


def test_where_bf16_is_emulated_a_row_says_so_and_nothing_is_timed(made_up_gpu, monkeypatch):
    made_up_gpu((7, 5), gib=15)
    monkeypatch.setattr(sys.modules[Table.__module__], "free_memory", lambda: None)
    by_dtype = Table("chapter", "products", lambda **config: {"tflops": 1.0}, {}, version=1)
    for dtype, status in (("float16", "ok"), ("bfloat16", "needs a GPU with bf16 units (compute capability 8.0)")):
        assert by_dtype.rows({"dtype": dtype, "size": 2})[0]["status"] == status
    made_up_gpu((8, 6), gib=15, built=("sm_80",))
    assert by_dtype.rows({"dtype": "bfloat16"})[0]["status"] == "ok"


def test_each_table_of_a_small_gpu_has_rows_that_need_no_bf16():
    for e in (e for chapter in chapters() for e in tables_of(chapter) if e.presets["gpu"]):
        dtypes = {str(config.get("dtype", config.get("precision"))) for config in e.presets["gpu"]}
        if e.table != "training":  # of the compilers: in bf16 only
            assert dtypes - {"bf16", "bfloat16"}, e


def test_a_small_gpu_gets_models_that_fit_it():
    """Counted on tensors without memory: the batch of the ladder that other tables use, with nothing to save memory."""
    named = {config.get("model") for e in tables_of("rush") for config in e.presets["gpu"] if e.table != "memory_plan"}
    assert "llama-3.2-1b" not in named
    job = Job(strategy="single", model="llama-60m", batch=8, sequence=2048, precision="amp-bf16")
    assert rank_memory(job, 1, count=True) < 7


@pytest.mark.parametrize(("gib", "mib"), [(7.6, 1024), (79, 4096)])
def test_a_copy_takes_a_share_of_the_memory(gib, mib, made_up_gpu):
    made_up_gpu(gib=gib)
    assert large_copy(on_cpu=64) == mib < gib * 1024 / 2
