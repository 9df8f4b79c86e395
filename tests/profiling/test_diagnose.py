import json
import math
import re
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from profiling import loops
from profiling.synthetic import BF16, FP32, STREAM, Synthetic
from torch import nn
from torch.profiler import profile

from helpers.profiling import findings as finding
from helpers.profiling.device_time import device_idle_share, device_windows
from helpers.profiling.diagnose import COLUMNS, diagnose
from helpers.profiling.read_trace import parse

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


def found(table):
    return set(table["finding"])


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
    table = diagnose(profiles(""))
    assert table.empty, table.to_string()
    assert list(table.columns) == COLUMNS
    assert table.attrs["steps"] == 3


@pytest.mark.parametrize(("stack", "shapes"), [(False, True), (True, False), (False, False)])
def test_a_clean_loop_has_none_with_less_recorded_either_and_the_notes_say_what_is_missing(stack, shapes):
    table = diagnose(loops.run(stack=stack, shapes=shapes))
    assert table.empty, table.to_string()
    notes = " ".join(table.attrs["notes"])
    assert ("with_stack=True" in notes, "record_shapes=True" in notes) == (not stack, not shapes)


@pytest.mark.parametrize("plant", loops.ON_CPU)
def test_what_is_planted_is_found_alone_by_its_name_and_where_it_stands(profiles, plant):
    table = diagnose(profiles(plant))
    assert found(table) == {loops.ON_CPU[plant]}, table.to_string()
    assert (table["count"] > 0).all()
    if plant == "validation":
        assert table["where"].tolist() == ["validation"]
    elif plant not in ("slow loader", "width 255", "deterministic"):  # of these the cause is not where it costs
        assert all(points_at(where, plant) for where in table["where"]), table["where"].tolist()


def test_counts_and_costs_are_means_over_the_steps(profiles):
    item, loader = diagnose(profiles("item")).iloc[0], diagnose(profiles("slow loader"))
    assert item["count"] == 1
    assert loader["count"].item() == 1
    assert 50 <= loader["cost_ms"].item() < loader.attrs["step_ms"]
    assert loader["share"].item() == pytest.approx(loader["cost_ms"].item() / loader.attrs["step_ms"])


def test_sizes_name_the_next_multiple_of_8(profiles):
    table = diagnose(profiles("width 255"))
    assert any("255 → 256" in advice for advice in table["advice"])


def test_the_most_expensive_comes_first_and_unknown_costs_last(profiles):
    table = diagnose(profiles("width 255"))
    assert table["cost_ms"].is_monotonic_decreasing
    assert math.isnan(diagnose(profiles("validation"))["cost_ms"].iloc[-1])


@pytest.mark.parametrize("plant", loops.ON_CPU)
def test_a_saved_trace_tells_the_same_names_but_for_lines(profiles, plant, tmp_path):
    live = diagnose(profiles(plant))
    profiles(plant).export_chrome_trace(str(tmp_path / "trace.json.gz"))
    saved = diagnose(tmp_path / "trace.json.gz")
    assert found(saved) == found(live) == {loops.ON_CPU[plant]}
    assert saved["count"].sum() == pytest.approx(live["count"].sum())


def test_kept_traces_tell_what_they_were_taken_for():
    """Traces of these loops on a CPU, by torch 2.13, without what nothing reads, and with the lines that called."""
    assert diagnose(TRACES / "cpu_clean.json.gz").empty
    table = diagnose(TRACES / "cpu_dead_projection.json.gz")
    assert found(table) == {finding.UNUSED}
    assert re.search(r"loops\.py:\d+ in forward", table["where"].item())


def test_of_a_trace_with_gaps_nothing_is_concluded_from_what_is_missing(profiles, tmp_path):
    path = tmp_path / "trace.json"
    loops.run().export_chrome_trace(str(path))
    text = path.read_text()
    for share in (0.4, 0.6, 0.8, 0.95):
        path.write_text(text[: int(len(text) * share)])
        table = diagnose(path)
        assert table.empty, table.to_string()
        assert any("cut off" in note for note in table.attrs["notes"])


def test_evaluation_without_a_graph_in_a_profile_of_its_own_is_clean_and_with_one_is_not():
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8))
    x = model[0].weight.detach()
    with profile(record_shapes=True) as prof:
        model(x)
    assert found(diagnose(prof)) == {finding.KEPT_GRAPH}
    model.requires_grad_(False)
    with profile(record_shapes=True) as prof:
        model(x)
    assert diagnose(prof).empty


def test_a_profile_that_is_not_one_or_holds_nothing_is_an_error_in_one_line():
    for wrong, said in [(3, "int"), (profile(), "holds nothing")]:
        with pytest.raises(ValueError, match=said) as error:
            diagnose(wrong)
        assert "\n" not in str(error.value)


# From here on the traces are synthetic: what only a GPU's trace shows.


def on_gpu(plant=lambda gpu, number: None, steps=4, **how):
    gpu = Synthetic()
    for number in range(steps):
        with gpu.step():
            gpu.train_step(number, **how)
            plant(gpu, number)
    return parse(gpu.events, {}, [])


def wait_for(call):
    def plant(gpu, _):
        gpu.call(call, max(gpu.free - gpu.now, 1.0))
        gpu.op("aten::add_")  # work follows, so it isn't the profiler's own wait at the end

    return plant


def copy(kind):
    return lambda gpu, _: gpu.op("aten::copy_", copy=kind, us=100.0, waits=True)


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
    gpu.call("cudaMalloc", 200.0)
    gpu.call("cudaFree", 300.0)


SYNTHETIC = {
    "cudaStreamSynchronize": (wait_for("cudaStreamSynchronize"), finding.HOST_WAITS),
    "cudaDeviceSynchronize": (wait_for("cudaDeviceSynchronize"), finding.HOST_WAITS),
    "read": (copy("Memcpy DtoH (Device -> Pinned)"), finding.HOST_WAITS),
    "pinned copy that waits": (copy("Memcpy HtoD (Pinned -> Device)"), finding.HOST_WAITS),
    "pageable copy": (copy("Memcpy HtoD (Pageable -> Device)"), finding.PAGEABLE),
    "tiny kernels": (tiny, finding.TINY_KERNELS),
    "slow path of attention": (attention, finding.ATTENTION),
    "unbenchmarked": (convolution(False), finding.UNBENCHMARKED),
    "slow loader": (slow_loader, finding.LOADER_WAITS),
    "reserve and return": (reserve, finding.RETURNED),
}


def test_a_clean_synthetic_gpu_trace_has_no_findings():
    table = diagnose(on_gpu())
    assert table.empty, table.to_string()


@pytest.mark.parametrize("name", SYNTHETIC)
def test_what_only_a_gpu_trace_shows_is_found_alone_by_its_name(name):
    plant, expected = SYNTHETIC[name]
    table = diagnose(on_gpu(plant))
    assert found(table) == {expected}, table.to_string()


@pytest.mark.parametrize(
    "plant",
    [convolution(True), convolution(False, lambda number: [32, 3, 224, 200 + number])],
    ids=["benchmarked", "sizes that change"],
)
def test_convolutions_that_nothing_is_gained_on_are_left_alone(plant):
    assert diagnose(on_gpu(plant)).empty


def test_the_profilers_own_wait_at_the_end_is_not_reported():
    gpu = Synthetic()
    with gpu.inside("user_annotation", "ProfilerStep#0"):
        gpu.train_step(0)
        gpu.call("cudaDeviceSynchronize", 500.0)
    assert diagnose(parse(gpu.events, {}, [])).empty


@pytest.mark.parametrize(
    ("kernel", "share"), [("ampere_sgemm_128x64_nn", 0.75), ("cutlass_80_tensorop_s1688gemm_128x128", 0.5)]
)
def test_fp32_products_cost_by_the_kernel_they_got(kernel, share):
    row = diagnose(on_gpu(dtype=FP32, kernel=kernel)).set_index("finding").loc[finding.FP32]
    assert row["cost_ms"] == pytest.approx(share * 0.6)  # 300 µs forward, 300 µs backward
    assert kernel[:20] in row["basis"]


def test_a_wait_costs_the_time_it_lasts():
    def plant(gpu, _):
        gpu.call("cudaStreamSynchronize", 700.0)
        gpu.op("aten::add_")

    row = diagnose(on_gpu(plant)).iloc[0]
    assert (row["count"], row["cost_ms"]) == (1, pytest.approx(0.7))


@pytest.mark.parametrize("memory", ["Pageable", "Pinned"])
def test_reading_a_tensor_costs_the_wait_for_the_work_before_it(memory):
    """In pageable memory it is the copy's own call that waits, in pinned memory the synchronisation after it."""

    def plant(gpu, _):
        gpu.launch("elementwise_kernel", us=5000.0)
        copy(f"Memcpy DtoH (Device -> {memory})")(gpu, _)

    [row] = diagnose(on_gpu(plant)).to_dict("records")
    assert (row["finding"], row["count"]) == (finding.HOST_WAITS, 1)
    assert 5.0 < row["cost_ms"] < 6.5


def test_work_that_was_launched_before_the_first_step_belongs_to_none():
    gpu = Synthetic()
    gpu.now = 1200.0
    gpu.write("kernel", "late", 1100.0, 1450.0, STREAM, correlation=99)  # its launch was not recorded
    with gpu.step():
        gpu.train_step(0)
    trace = parse(gpu.events, {}, [])
    assert [trace.step_of(e) for e in trace.device if e.name == "late"] == [None]
    assert device_windows(trace)[0][0] >= 1200.0


def test_emptying_the_cache_costs_what_reserves_it_again():
    def plant(gpu, _):
        with gpu.inside("python_function", "train.py(3): train"):
            with gpu.inside("python_function", "torch/cuda/memory.py(200): empty_cache"):
                gpu.call("cudaFree", 300.0)
            gpu.call("cudaMalloc", 200.0)

    [row] = diagnose(on_gpu(plant)).query("finding == @finding.RETURNED").to_dict("records")
    assert row["cost_ms"] == pytest.approx(0.5, abs=0.01) and "remove torch.cuda.empty_cache()" in row["advice"]


def test_waits_that_are_seldom_count_by_how_often_they_are():
    def plant(gpu, number):
        if number == 1:
            wait_for("cudaStreamSynchronize")(gpu, number)

    assert diagnose(on_gpu(plant)).iloc[0]["count"] == 0.25


def test_unaligned_sizes_follow_the_type():
    def product(k, dtype):
        return lambda gpu, _: gpu.op("aten::mm", [[256, k], [k, 512]], dtype, kernel="gemm")

    assert found(diagnose(on_gpu(product(516, BF16)))) == {finding.UNALIGNED}  # 516 = 4 · 129
    assert finding.UNALIGNED not in found(diagnose(on_gpu(product(516, FP32))))
    assert finding.UNALIGNED in found(diagnose(on_gpu(product(515, FP32))))


def test_every_name_is_planted_somewhere():
    planted = {*loops.ON_CPU.values(), *loops.ON_CUDA_ONLY.values()}
    assert planted == {value for name, value in vars(finding).items() if name.isupper()}


def test_the_idle_share_is_measured_on_the_devices_clock():
    """The loader's 2 ms leave the device idle; a host that runs ahead doesn't."""
    assert device_idle_share(on_gpu()) < 0.1
    waiting = device_idle_share(on_gpu(slow_loader))
    assert waiting == pytest.approx(2000 / (2000 + 800), abs=0.05)


def test_findings_can_be_saved_as_json():
    table = diagnose(on_gpu(tiny))
    assert json.loads(table.to_json(orient="records"))[0]["finding"] == finding.TINY_KERNELS


@settings(deadline=None, max_examples=60)
@given(st.data())
def test_missing_or_foreign_fields_are_no_crash(data):
    """As another version may write them: arguments gone, empty, or of another kind."""
    gpu = Synthetic()
    plants = [plant for plant, _ in SYNTHETIC.values()]
    for number in range(2):
        with gpu.step():
            gpu.train_step(number)
            for plant in plants:
                plant(gpu, number)
    keys = ("Input Dims", "Input type", "Concrete Inputs", "Sequence number", "correlation", "bytes")
    key = data.draw(st.sampled_from(keys))
    value = data.draw(st.sampled_from([None, [], [[]], [None], "text", ["1"], [[[2, 3]]]]))
    chosen = data.draw(st.sets(st.integers(0, len(gpu.events) - 1)))
    for i in chosen:
        if value is None:
            gpu.events[i]["args"].pop(key, None)
        elif key in gpu.events[i]["args"]:
            gpu.events[i]["args"][key] = value
    diagnose(parse(gpu.events, {}, []))
