import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from helpers.chapters.compilers import fusion
from helpers.chapters.compilers.fusion import COMPILED, EAGER, FOREACH, FUSED, MANY, ONE_PRODUCT, WIDTH
from helpers.compilers import backends, kernels
from helpers.compilers.kernels import eager_bytes, nbytes

SIZE = MANY * WIDTH
on_the_cpu = pytest.mark.skipif(torch.cuda.is_available(), reason="counts a CPU's kernels")


@pytest.fixture
def measured(monkeypatch):
    """The rows of a case, by variant, without compiling."""
    monkeypatch.setattr(backends, "missing_because", lambda backend: "not tested here")
    return rows_of


def rows_of(case):
    rows = {row["variant"]: row for row in fusion.measure(case, SIZE)}
    for row in rows.values():
        if "status" in row:
            continue
        assert row["kernels"] >= 1
        assert row["p20_ms"] <= row["median_ms"] <= row["p80_ms"]
        assert row["low"] <= row["ratio"] <= row["high"]
        assert row["baseline_ms"] == rows[EAGER]["median_ms"]
        assert row["bytes_least"] <= row["bytes_moved"]
    return rows


@pytest.mark.parametrize("case", ["softmax", "LayerNorm", "many pointwise"])
def test_every_variant_agrees_with_the_eager_one(case, measured):
    *_, compiled = measured(case).values()
    assert compiled == {"variant": COMPILED, "status": "not tested here"}


@pytest.mark.long
@pytest.mark.usefixtures("compiler")
@on_the_cpu
def test_vertical_fusion_makes_a_chain_one_kernel_that_moves_the_least():
    rows = rows_of("pointwise chain")
    eager, compiled = rows[EAGER], rows[COMPILED]
    assert (eager["kernels"], compiled["kernels"]) == (4, 1)
    assert compiled["kernel_names"].startswith("cpp_fused_")
    assert compiled["bytes_moved"] == compiled["bytes_least"] == eager["bytes_least"]
    assert eager["bytes_moved"] > 2.5 * compiled["bytes_moved"]


def test_one_product_of_concatenated_weights_reads_their_input_once(measured):
    rows = measured("three Linears")
    eager, one = rows[EAGER], rows[ONE_PRODUCT]
    assert (eager["kernels"], one["kernels"]) == (3, 1)
    assert eager["bytes_moved"] > one["bytes_moved"] == one["bytes_least"]


@on_the_cpu
def test_lists_are_loops_on_the_cpu_and_a_fused_optimizer_is_one_kernel(measured):
    rows = measured("AdamW")
    eager, lists, fused = rows[EAGER], rows[FOREACH], rows[FUSED]
    assert eager["kernels"] == lists["kernels"] == 9 * MANY
    assert fused["kernel_names"].split(", ") == ["aten::add_", "aten::_fused_adamw_"]
    assert fused["kernels"] == MANY + 1  # the counts of steps, one by one
    assert fused["bytes_moved"] < eager["bytes_moved"] / 2
    assert fused["bytes_least"] > 0.99 * fused["bytes_moved"]


@on_the_cpu
@pytest.mark.parametrize(
    ("fn", "names"),
    [
        (lambda x: torch.empty_like(x), []),
        (lambda x: x * 2, ["aten::mul"]),
        (lambda x: x.mean(-1), ["aten::sum", "aten::div_"]),
        (lambda x: F.linear(x, x), ["aten::mm"]),
        (lambda x: x.t().contiguous(), ["aten::clone"]),
        (lambda x: torch._foreach_tanh([x, x]), ["aten::tanh", "aten::tanh"]),
    ],
)
def test_a_kernel_is_an_operation_that_does_work(fn, names):
    x = torch.randn(8, 8)
    fn(x)
    assert kernels.kernel_names(lambda: fn(x)) == names


@settings(deadline=None, max_examples=15)
@given(st.integers(1, 9), st.integers(1, 9), st.sampled_from([torch.float32, torch.bfloat16, torch.int64]))
def test_bytes_are_arguments_read_and_results_written(rows, columns, dtype):
    x, y = torch.ones(rows, columns, dtype=dtype), torch.zeros(rows, columns, dtype=dtype)
    row, size = torch.ones(columns, dtype=dtype), x.element_size()
    whole = rows * columns * size
    assert eager_bytes(lambda: x + y) == 3 * whole
    assert eager_bytes(lambda: x + x) == 2 * whole
    assert eager_bytes(lambda: x + row) == 2 * whole + columns * size
    assert eager_bytes(lambda: x + row.expand(rows, columns)) == 2 * whole + columns * size
    assert eager_bytes(lambda: torch.empty_like(x).t()) == 0
    assert eager_bytes(lambda: x.add_(y)) == 3 * whole
    assert eager_bytes(lambda: x.zero_()) == whole
    assert eager_bytes(lambda: x.copy_(y)) == 2 * whole
    assert eager_bytes(lambda: torch.add(x, y, out=y)) == 3 * whole
    assert eager_bytes(lambda: torch._foreach_add([x, y], 1)) == 4 * whole


def test_bytes_of_a_product_are_its_operands_and_its_result():
    x, w = torch.ones(5, 7), torch.ones(3, 7)
    assert eager_bytes(lambda: F.linear(x, w)) == 4 * (5 * 7 + 3 * 7 + 5 * 3)
    assert nbytes([x, x, None, 3]) == 4 * 5 * 7
