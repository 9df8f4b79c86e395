import contextlib
import gzip
import json
import math
import re
from pathlib import Path

import pytest
from cases import loops
from findings.synthetic import BF16, FP32, STREAM, Synthetic, parse
from torch.profiler import profile

from helpers import faults
from helpers.findings.account import IDLE, device_account
from helpers.findings.diagnose import diagnose
from helpers.findings.rules import products
from helpers.findings.summary import SPECIFIC

SOURCE = Path(loops.__file__).read_text().splitlines()
TRACES = Path(__file__).parent / "traces"


@pytest.fixture(scope="module")
def profiles():
    """Each loop is profiled once."""
    taken = {}

    def take(plant):
        if plant not in taken:
            taken[plant] = loops.run(plant)
        return taken[plant]

    return take


IN_NOTES = {"host synchronisation", "deterministic cuDNN", "graph kept in evaluation"}  # what costs a CPU no time


def names_in(diagnosis):
    """The names of the findings, and of what the notes say would cost a GPU time, or costs memory."""
    noted = {name for name in IN_NOTES for note in diagnosis.notes if note.kind == name}
    return set(diagnosis.table["finding"]) | noted


def only(diagnosis):
    [single] = diagnosis.findings
    return single


def points_at(where: str, plant: str) -> bool:
    """Whether a place is the line marked for the plant, or the function that holds that line."""
    marked = {n for n, line in enumerate(SOURCE, 1) if re.search(rf"# plant (.*, )?{plant}(,|$)", line)}
    if line := re.search(r"loops\.py:(\d+) in", where):
        return int(line[1]) in marked
    if first := re.search(r"loops\.py, from line (\d+)", where):
        begin = int(first[1])
        ends = [n for n, line in enumerate(SOURCE, 1) if n > begin and re.match(r"\s*(def|class) ", line)]
        return any(begin <= n < min(ends, default=math.inf) for n in marked)
    return False


def test_a_clean_loop_has_no_findings(profiles):
    clean = diagnose(profiles(""))
    assert not names_in(clean), str(clean)
    assert clean.steps == 3
    assert sum(clean.host.values()) == pytest.approx(1)


def test_a_clean_loop_has_none_with_less_recorded_either_and_the_notes_say_what_is_missing():
    clean = diagnose(loops.run(stack=False, shapes=False))
    assert not names_in(clean), str(clean)
    notes = " ".join(note.text for note in clean.notes)
    assert "with_stack=True" in notes and "record_shapes=True" in notes


@pytest.mark.parametrize("plant", loops.ON_CPU)
def test_what_is_planted_is_found_alone_by_its_name_and_where_it_stands(profiles, plant):
    table = diagnose(profiles(plant), least=0.0)
    expected = loops.ON_CPU[plant]
    by_others = {"waiting for the loader"} - {expected}  # a core that others have just then makes any batch late
    assert names_in(table) - by_others == {expected}, str(table)
    if plant == "validation":
        assert any("graph kept in evaluation: validation" in note.text for note in table.notes)
    elif plant not in ("slow loader", "width 255", "deterministic"):  # of these the cause is not where it costs
        diagnosed = [f.where for f in table.findings if f.finding == expected]
        diagnosed += [note.text for note in table.notes if note.kind in IN_NOTES]
        assert all(points_at(where, plant) for where in diagnosed), diagnosed


def test_gains_are_of_a_step_and_of_the_recorded_time(profiles):
    slow = diagnose(profiles("slow loader"))
    loader = only(slow)
    assert 50 <= loader.gain_ms < slow.step_ms
    assert loader.gain_share == pytest.approx(slow.host["loader"])


def test_saved_profiles_of_a_loop_share_places_and_costs(profiles, tmp_path):
    """Costs come from the profile without stacks, lines from the one with them."""
    plant = "dead projection"
    profiles(plant).export_chrome_trace(str(tmp_path / "places.json.gz"))
    assert names_in(diagnose(tmp_path / "places.json.gz", least=0.0)) == {loops.ON_CPU[plant]}
    loops.run(plant, stack=False, shapes=False).export_chrome_trace(str(tmp_path / "costs.json.gz"))
    both = diagnose(tmp_path, least=0.0)
    assert points_at(only(both).where, plant)
    assert not diagnose(tmp_path, least=1.0).findings
    assert both.step_ms == diagnose(tmp_path / "costs.json.gz").step_ms
    assert not any("no Python frames" in note.text for note in both.notes)


def test_a_profile_that_is_not_one_or_holds_nothing_is_an_error_in_one_line():
    for wrong, message in [(3, "int"), (profile(), "holds nothing")]:
        with pytest.raises(ValueError, match=message) as error:
            diagnose(wrong)
        assert "\n" not in str(error.value)


# From here on the traces are synthetic: what only a GPU's trace shows.


def nothing(gpu, number):
    pass


def on_gpu(plant=nothing, steps=4, about=None, **how):
    gpu = Synthetic()
    for number in range(steps):
        with gpu.step():
            gpu.train_step(number, **how)
            plant(gpu, number)
    return parse(gpu.events, **about or {})


def wait_for(call):
    def plant(gpu, _):
        gpu.call(call, max(gpu.free - gpu.now, 1.0))
        gpu.now += 100
        gpu.op("aten::add_")  # work follows, so it isn't the profiler's own wait at the end

    return plant


def copy(kind):
    def plant(gpu, _):
        gpu.op("aten::copy_", copy=kind, us=2.0, waits=True)
        gpu.now += 100

    return plant


def tiny(gpu, _):
    for _ in range(150):
        gpu.now += 6
        gpu.op("aten::mul", kernel="elementwise_kernel", us=2.0)


def attention(gpu, number):
    with gpu.inside("cpu_op", "aten::_scaled_dot_product_attention_math"):
        gpu.op("aten::bmm", [[8, 64, 32], [8, 32, 64]], kernel="gemm_bf16", us=40.0)
        gpu.op("aten::_softmax", [[2, 4, 64, 64]], kernel="softmax", us=70.0)
        gpu.op("aten::bmm", [[8, 64, 64], [8, 64, 32]], kernel="gemm_bf16", us=40.0)


def convolution(benchmark, shape=lambda number: [32, 3, 224, 224]):
    flags = [""] * 9 + [str(benchmark), "False", "True", "True"]
    return lambda gpu, number: gpu.op(
        "aten::_convolution", [shape(number), [64, 3, 7, 7]], values=flags, kernel="implicit_gemm", us=200.0
    )


def slow_loader(gpu, _):
    with gpu.inside("user_annotation", "enumerate(DataLoader)#_SingleProcessDataLoaderIter.__next__"):
        gpu.now = max(gpu.now, gpu.free) + 2000


def reserve(gpu, number):
    gpu.now = max(gpu.now, gpu.free)
    gpu.call("cudaMalloc", 200.0)
    gpu.call("cudaFree", 300.0)


SYNTHETIC = {
    "cudaStreamSynchronize": (wait_for("cudaStreamSynchronize"), "host synchronisation"),
    "read": (copy("Memcpy DtoH (Device -> Pinned)"), "host synchronisation"),
    "pinned copy that waits": (copy("Memcpy HtoD (Pinned -> Device)"), "host synchronisation"),
    "pageable copy": (copy("Memcpy HtoD (Pageable -> Device)"), "copies from pageable memory"),
    "tiny kernels": (tiny, "host slower than the device"),
    "slow path of attention": (attention, "attention from matmul and softmax"),
    "unbenchmarked": (convolution(False), "unbenchmarked cuDNN"),
    "slow loader": (slow_loader, "waiting for the loader"),
    "reserve and return": (reserve, "memory returned and reserved again"),
}


@pytest.mark.parametrize("name", SYNTHETIC)
def test_what_only_a_gpu_trace_shows_is_found_alone_by_its_name(name):
    plant, expected = SYNTHETIC[name]
    diagnosed = diagnose(on_gpu(plant))
    assert names_in(diagnosed) == {expected}, str(diagnosed)
    assert only(diagnosed).gain_share <= diagnosed.account[only(diagnosed).part] + 1e-9


@pytest.mark.parametrize(
    "plant",
    [nothing, convolution(True), convolution(False, lambda number: [32, 3, 224, 200 + number])],
    ids=["clean", "benchmarked", "sizes that change"],
)
def test_a_gpu_trace_that_nothing_is_gained_on_has_no_findings(plant):
    diagnosed = diagnose(on_gpu(plant))
    assert not diagnosed.findings, str(diagnosed)


def test_the_profilers_own_wait_at_the_end_is_not_reported():
    gpu = Synthetic()
    with gpu.inside("user_annotation", "ProfilerStep#0"):
        gpu.train_step(0)
        gpu.call("cudaDeviceSynchronize", 5000.0)
    diagnosed = diagnose(parse(gpu.events))
    assert not diagnosed.findings
    assert any("cudaDeviceSynchronize" in note.text for note in diagnosed.notes)


@pytest.mark.parametrize(
    ("kernel", "share"), [("ampere_sgemm_128x64_nn", 0.75), ("cutlass_80_tensorop_s1688gemm_128x128", 0.5)]
)
def test_fp32_products_gain_by_the_kernel_they_got(kernel, share):
    first = only(diagnose(on_gpu(dtype=FP32, kernel=kernel)))
    assert first.finding == "fp32 products"
    assert first.gain_ms == pytest.approx(share * 0.6)  # 300 µs forward, 300 µs backward
    assert kernel[:20] in first.evidence


@pytest.mark.parametrize(
    ("capability", "advised", "not_advised"),
    [((9, 0), "bf16", "GradScaler"), ((7, 0), "fp16, with a GradScaler", "bf16"), ((6, 1), None, "fp16")],
)
def test_a_remedy_is_one_that_the_gpu_has(capability, advised, not_advised):
    about = {"deviceProperties": [{"id": 0, "computeMajor": capability[0], "computeMinor": capability[1]}]}
    diagnosed = diagnose(on_gpu(about=about, dtype=FP32, kernel="volta_sgemm_128x64_nn"))
    assert ("fp32 products" in names_in(diagnosed)) == (advised is not None)
    advice = " ".join(f.advice for f in diagnosed.findings)
    assert (advised or "") in advice and not_advised not in advice


@pytest.mark.parametrize(("kernel", "kind"), [("nvjet_sm90_tst_128x256", "16 bits"), ("nvjet_sss_64x64", "TF32")])
def test_cublas_newest_kernels_are_products_on_tensor_cores(kernel, kind):
    trace = on_gpu(dtype=FP32, kernel=kernel)
    assert {products.product_type(e) for e in products.kernels_that(trace, "product")} == {kind}


def test_products_of_an_autocast_wrapper_are_not_called_fp32():
    """The op that casts gets fp32 inputs, the kernel computes in bf16."""
    assert "fp32 products" not in names_in(diagnose(on_gpu(dtype=FP32, kernel="sm90_xmma_gemm_bf16bf16_bf16f32")))


def test_a_wait_costs_the_time_that_the_device_idles_after_it_and_not_its_length():
    def plant(gpu, _):
        gpu.launch("elementwise_kernel", us=5000.0)
        gpu.call("cudaStreamSynchronize", gpu.free - gpu.now)
        gpu.now += 400

    diagnosed = diagnose(on_gpu(plant))
    waits = next(f for f in diagnosed.findings if f.finding == "host synchronisation")
    assert waits.gain_ms == pytest.approx(0.4, abs=0.1)


def test_a_wait_in_which_the_device_has_nothing_to_do_is_told_apart():
    """Nothing that the host could do would fill it: events are missing, or another rank is late."""

    def plant(gpu, _):
        gpu.now = max(gpu.now, gpu.free)
        gpu.launch("ncclDevKernel_AllReduce", us=10.0)
        gpu.call("cudaStreamSynchronize", 50_000.0)

    diagnosed = diagnose(on_gpu(plant))
    assert diagnosed.bound == "unknown"
    assert diagnosed.idle["wait for the device"] > 0.9
    assert sum(f.gain_share for f in diagnosed.findings) < 0.05
    assert any("events are missing" in note.text for note in diagnosed.warnings)


def test_the_account_counts_copies_as_work_and_adds_up():
    def plant(gpu, _):
        gpu.now = max(gpu.now, gpu.free)
        gpu.launch(copy="Memcpy HtoD (Pinned -> Device)", us=1600.0)
        gpu.now = gpu.free

    shares = diagnose(on_gpu(plant)).account
    assert sum(shares.values()) == pytest.approx(1)
    assert shares["copies"] == pytest.approx(1600 / 2400, abs=0.05)
    assert shares["idle"] < 0.05


def test_communication_counts_where_nothing_computes():
    def plant(gpu, _):
        for _ in range(60):
            gpu.launch("ncclKernel_AllReduce_RING_LL_Sum_float(ncclWorkElem)", us=10.0)

    diagnosed = diagnose(on_gpu(plant))
    assert diagnosed.account["communication"] == pytest.approx(600 / 1400, abs=0.05)
    assert only(diagnosed).finding == "exposed communication"
    assert "60 a step" in only(diagnosed).evidence and "buckets" in only(diagnosed).advice


def test_start_up_is_named_and_is_nobodys_fault():
    def plant(gpu, number):
        if number == 0:
            gpu.now = max(gpu.now, gpu.free)
            gpu.call("cudaFree", 20_000.0)

    diagnosed = diagnose(on_gpu(plant))
    assert diagnosed.bound == "start-up"
    assert not diagnosed.findings
    assert "cudaFree" in diagnosed.warnings[0].text


def test_one_slow_step_decides_nothing():
    def plant(gpu, number):
        if number == 3:
            gpu.now = max(gpu.now, gpu.free) + 20_000

    diagnosed = diagnose(on_gpu(plant, steps=8))
    assert diagnosed.step_ms == pytest.approx(0.85, abs=0.1)
    assert not diagnosed.findings
    assert any("took over twice the median" in note.text for note in diagnosed.warnings)


@pytest.mark.parametrize("mark", ["Optimizer.step#", "enumerate(DataLoader)#"])
def test_steps_are_found_without_marks(mark):
    gpu = Synthetic()
    for number in range(4):
        gpu.train_step(number)
    events = [e for e in gpu.events if mark in e["name"] or "#" not in e["name"]]
    assert diagnose(parse(events)).steps == 4


@pytest.mark.parametrize(
    ("lost", "message"),
    [(("kernel", "gpu_memcpy"), "device events are missing"), (("cudaMemcpyAsync",), "1 device events have no launch")],
)
def test_lost_events_are_a_warning(lost, message):
    gpu = Synthetic()
    gpu.train_step(0)
    diagnosed = diagnose(parse([e for e in gpu.events if not {e["cat"], e["name"]} & set(lost)]))
    assert any(message in note.text for note in diagnosed.warnings)


def test_work_that_was_launched_before_the_first_step_belongs_to_none():
    gpu = Synthetic()
    gpu.now = 1200.0
    gpu.write("kernel", "late", 1100.0, 1450.0, STREAM, correlation=99)  # its launch was not recorded
    with gpu.step():
        gpu.train_step(0)
    trace = parse(gpu.events)
    assert [trace.step_of(e) for e in trace.device if e.name == "late"] == [None]


def test_emptying_the_cache_costs_what_reserves_it_again():
    def plant(gpu, _):
        with gpu.inside("python_function", "train.py(3): train"):
            gpu.now = max(gpu.now, gpu.free)
            with gpu.inside("python_function", "torch/cuda/memory.py(200): empty_cache"):
                gpu.call("cudaFree", 300.0)
            gpu.call("cudaMalloc", 200.0)

    # No device work follows the last step's calls.
    returned = next(f for f in diagnose(on_gpu(plant)).findings if f.finding == "memory returned and reserved again")
    assert (
        returned.gain_ms == pytest.approx(3 / 4 * 0.5, abs=0.02)
        and "remove torch.cuda.empty_cache()" in returned.advice
    )


def test_who_emptied_the_cache_is_known_from_the_profile_with_stacks(tmp_path):
    for name, stacks in {"costs": False, "places": True}.items():
        gpu = Synthetic()
        for number in range(4):
            with gpu.step():
                gpu.train_step(number)
                gpu.now = max(gpu.now, gpu.free)
                frame = ("python_function", "torch/cuda/memory.py(200): empty_cache")
                with gpu.inside(*frame) if stacks else contextlib.nullcontext():
                    gpu.call("cudaFree", 300.0)
                gpu.call("cudaMalloc", 200.0)
        (tmp_path / f"{name}.json.gz").write_bytes(gzip.compress(json.dumps({"traceEvents": gpu.events}).encode()))
    returned = diagnose(tmp_path).findings[0]
    assert (
        returned.finding == "memory returned and reserved again"
        and "remove torch.cuda.empty_cache()" in returned.advice
    )


def test_unaligned_sizes_follow_the_type():
    def product(k, dtype):
        return lambda gpu, _: gpu.op("aten::mm", [[256, k], [k, 512]], dtype, kernel="gemm")

    assert names_in(diagnose(on_gpu(product(516, BF16)))) == {"unaligned sizes"}  # 516 = 4 · 129
    assert "unaligned sizes" not in names_in(diagnose(on_gpu(product(516, FP32))))
    assert "unaligned sizes" in names_in(diagnose(on_gpu(product(515, FP32))))


def test_a_bias_and_a_mask_are_no_pairs():
    def scores(gpu, _):
        gpu.op("aten::add", [[1, 8, 128, 128], [16, 1, 1, 128]], FP32, kernel="elementwise")
        gpu.op("aten::_softmax", [[16, 8, 128, 128]], FP32, kernel="softmax")
        gpu.op("aten::sum", [[0, 8]], FP32, kernel="reduce_kernel")  # of what a mask left

    def distances(gpu, _):
        gpu.op("aten::sub", [[128, 1, 64], [1, 128, 64]], FP32, kernel="elementwise")
        gpu.op("aten::sum", [[128, 128, 64]], FP32, kernel="reduce_kernel")

    assert "pairs by broadcasting" not in names_in(diagnose(on_gpu(scores)))
    assert "pairs by broadcasting" in names_in(diagnose(on_gpu(distances)))


def test_every_fault_is_planted_somewhere():
    planted = {*loops.ON_CPU.values(), *loops.ON_CUDA_ONLY.values()}
    elsewhere = {"exposed communication", "exposed copies"}  # in profiles that others published
    elsewhere |= {"gradients without an optimizer", "costly line", "small operators"}  # in a test's script
    elsewhere |= {"one thread", "deterministic algorithms", "slower and slower"}
    elsewhere |= {"slow steps", "work between epochs", "workers on the step's cores", "weights formed anew"}
    elsewhere |= {"gradients averaged too often", "slow 16-bit products"}
    elsewhere |= {*SPECIFIC, "uncompiled flex_attention", "attention with a mask"}  # in test_slow_paths.py
    elsewhere |= {"slow convolutions", "logits in fp32"}
    assert {name for name, fault in faults.entries().items() if not fault.planted} - planted == elsewhere


def test_the_idle_share_is_measured_on_the_devices_clock():
    """The loader's 2 ms leave the device idle; a host that runs ahead doesn't."""
    assert device_account(on_gpu()).shares[IDLE] < 0.1
    assert diagnose(on_gpu(slow_loader)).bound == "input"
    waiting = device_account(on_gpu(slow_loader)).shares[IDLE]
    assert waiting == pytest.approx(3 * 2000 / (3 * 2000 + 4 * 800), abs=0.02)
