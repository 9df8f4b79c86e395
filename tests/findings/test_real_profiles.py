"""Profiles of GPUs that other projects published (licences beside them), with shares that an independent count gave."""

import gzip
import json
from pathlib import Path

import pytest
from findings.synthetic import Synthetic, parse

from helpers.findings.diagnose import diagnose
from helpers.findings.rules.products import kind_of

TRACES = Path(__file__).parent / "traces"
ACCOUNTS = {
    "param_dlrm_rank7": ("host", {"compute": 0.097, "communication": 0.144, "copies": 0.002, "idle": 0.758}),
    "hta_minitoy_mi250": ("host", {"compute": 0.011, "communication": 0.0, "copies": 0.004, "idle": 0.985}),
    "tracelens_vllm_decode_graph_mi300x": (
        "compute",
        {"compute": 0.994, "communication": 0.0, "copies": 0.004, "idle": 0.002},
    ),
}


def raw(name):
    return json.loads(gzip.decompress((TRACES / f"{name}.json.gz").read_bytes()))


@pytest.mark.parametrize(
    ("kernel", "kind"),
    [
        ("void cudnn::ops::nchwToNhwcKernel<float, float, float, false, true, (cudnnKernelDataType_t)2>", "layout"),
        ("void cudnn::ops::nhwcToNchwKernel<float, float, float, true, false, (cudnnKernelDataType_t)0>", "layout"),
        ("void at::native::vectorized_elementwise_kernel<4, at::native::CUDAFunctor_add<float>>", "elementwise"),
        ("volta_sgemm_64x64_nt", "product"),
        ("void cudnn::winograd_nonfused::winogradForwardData4x4<float, float>", "product"),
        ("void cudnn::bn_fw_tr_1C11_kernel_NCHW<float, float, int, 32, true, 1, true>", "other"),
        ("ncclKernel_AllReduce_RING_LL_Sum_float(ncclWorkElem)", "other"),
    ],
)
def test_a_kernels_kind_is_read_from_its_name(kernel, kind):
    assert kind_of(kernel) == kind


@pytest.fixture(scope="module")
def diagnoses():
    return {name: diagnose(TRACES / f"{name}.json.gz") for name in ACCOUNTS}


@pytest.mark.parametrize("name", ACCOUNTS)
def test_the_account_is_that_of_an_independent_count(diagnoses, name):
    bound, shares = ACCOUNTS[name]
    assert diagnoses[name].bound == bound
    assert diagnoses[name].account == pytest.approx(shares, abs=0.01)
    assert sum(diagnoses[name].idle.values()) == pytest.approx(diagnoses[name].account["idle"])
    assert all(f.gain_share <= diagnoses[name].account[f.part] + 1e-9 for f in diagnoses[name].findings)


def test_what_each_is_slow_in_is_told(diagnoses):
    rank, toy, graph = diagnoses.values()
    assert "hipLaunchKernel" in toy.warnings[0].text and toy.warnings[0].kind == "start-up"
    assert rank.findings[0].finding == "host slower than the device"
    assert "exposed communication" in {f.finding for f in rank.findings}
    (rate,) = (note.text for note in rank.notes if note.kind == "rate of products")
    assert "20% of the compute time at 0.289 TFLOP/s, 2% of the 15.7 of Tesla V100" in rate
    assert not graph.findings
    assert any("421 of 425 kernels come from 1 graph launch" in note.text for note in graph.notes)


def write_rank(path, rank, reduce_us=400.0):
    gpu = Synthetic()
    for number in range(2):
        with gpu.step():
            gpu.train_step(number)
            gpu.launch("ncclDevKernel_AllReduce", us=reduce_us)
    about = {"distributedInfo": {"rank": rank, "world_size": 3}}
    path.write_text(json.dumps(about | {"traceEvents": gpu.events}))


def test_the_ranks_of_a_folder_are_one_run(tmp_path):
    """A late rank spends the least time in collectives; the others wait for it there."""
    with pytest.raises(ValueError, match="holds no profile"):
        diagnose(tmp_path)
    for rank, reduce_us in enumerate((400.0, 100.0, 400.0)):
        write_rank(tmp_path / f"rank{rank}.json", rank, reduce_us)
    several = diagnose(tmp_path)
    assert several.source == tmp_path / "rank1.json"
    assert several.warnings[0].text.startswith("rank 1 is the last to arrive")
    write_rank(tmp_path / "rank3.json", 2)
    with pytest.raises(ValueError, match=r"both of rank 2"):
        diagnose(tmp_path)


def test_shares_sum_whatever_is_left_out():
    """An account needs no steps, no stacks, no launches."""
    on_device = ("kernel", "gpu_memcpy", "gpu_memset")
    events = [e for e in raw("param_dlrm_rank7")["traceEvents"] if e.get("cat") in on_device]
    alone = diagnose(parse(events))
    assert sum(alone.account.values()) == pytest.approx(1)
    assert alone.account["compute"] == pytest.approx(0.097, abs=0.01)
