"""What rules read from shapes and places: sizes, bytes that one product saves, the dearest of several lines."""

import itertools
import math

import pytest
from findings.synthetic import BF16, FP32, Synthetic, parse

from helpers.findings.rules.host_work import SAVED_ON_CPU, SMALL_AND_LARGE_US, _saved_on_a_cpu
from helpers.findings.rules.needless import _constructed_shape, dense_gradients, separate_projections
from helpers.findings.rules.products import product
from helpers.findings.rules.waiting import host_waits
from helpers.findings.scene import Scene
from helpers.findings.trace import Event


def op(name, dims=(), values=(), us=10.0):
    return Event(name, "op", 0.0, us, (1, 1), {"Input Dims": list(dims), "Concrete Inputs": list(values)})


@pytest.mark.parametrize(
    ("name", "values", "shape"),
    [
        ("arange", ["7"], [7]),
        ("arange", ["7", "", "", "", ""], [7]),
        ("arange", ["3", "7", "", "", "", ""], [4]),
        ("arange", ["0", "7", "2", "", "", "", ""], [4]),
        ("arange", ["7", "3", "", "", "", ""], [0]),
        ("ones", ["[4, 5]", "", "", "", ""], [4, 5]),
        ("eye", ["6", "", "", "", ""], [6, 6]),
        ("scalar_tensor", ["6"], []),
        ("arange", [], [0]),
    ],
)
def test_a_constructors_shape_follows_from_its_arguments(name, values, shape):
    assert _constructed_shape(op(f"aten::{name}", values=values)) == shape


@pytest.mark.parametrize(
    ("name", "dims", "sizes"),
    [
        ("mm", [[7, 5], [5, 3]], (1, 7, 5, 3)),
        ("addmm", [[3], [7, 5], [5, 3]], (1, 7, 5, 3)),
        ("bmm", [[4, 7, 5], [4, 5, 3]], (4, 7, 5, 3)),
        ("baddbmm", [[4, 7, 3], [4, 7, 5], [4, 5, 3]], (4, 7, 5, 3)),
        ("addmm", [[3], [7, 5]], None),
        ("mm", [[7, 5], [5]], None),
    ],
)
def test_a_products_sizes_and_operations_follow_from_its_operands_shapes(name, dims, sizes):
    read = product(op(f"aten::{name}", dims))
    assert (read and (read.batch, read.m, read.k, read.n)) == sizes
    assert read is None or read.operations == 2 * math.prod(sizes)


@pytest.mark.parametrize(("mark", "ends"), [("Optimizer.step#", True), ("enumerate(DataLoader)#", False)])
def test_steps_without_marks_last_from_update_to_update_or_from_batch_to_batch(mark, ends):
    made = Synthetic()
    for number in range(3):
        made.train_step(number)
    trace = parse([e for e in made.events if mark in e["name"] or "#" not in e["name"]])
    marks = [(event.begin, event.end) for event in trace.host if event.name.startswith(mark)]
    events = [*trace.host, *trace.device]
    first, last = min(event.begin for event in events), max(event.end for event in events)
    times = [first, *(end for _, end in marks)] if ends else [*(begin for begin, _ in marks), last]
    assert [(step.begin, step.end) for step in trace.steps] == list(itertools.pairwise(times))


def test_an_event_without_a_duration_takes_no_time_and_no_device_time_is_its_own():
    begun = {"ph": "X", "cat": "cpu_op", "name": "aten::mm", "pid": 1, "tid": 1, "ts": 5}
    trace = parse([begun, begun | {"name": "aten::add", "ts": 7, "dur": 2}])
    assert [(event.begin, event.us, event.device_us) for event in trace.host] == [(5, 0, 0), (7, 2, 0)]


def test_an_optimizers_small_ops_gain_nearly_all_and_large_ones_what_passes_through_memory_save():
    small, large = SAVED_ON_CPU
    short, long = SMALL_AND_LARGE_US
    assert _saved_on_a_cpu([op("aten::mul", us=short / 2)]) == pytest.approx(small)
    assert _saved_on_a_cpu([op("aten::mul", us=2 * long)]) == pytest.approx(large)
    mixed = [op("aten::mul", us=short), op("aten::add", us=3 * long)]
    assert _saved_on_a_cpu(mixed) == pytest.approx((small * short + large * 3 * long) / (short + 3 * long))
    assert _saved_on_a_cpu([op("aten::mul", us=(short + long) / 2)]) == pytest.approx((small + large) / 2)


def on_cpu(*ops, steps=2):
    """A trace of steps of a millisecond and these ops of 100 µs, each (name, dims, values)."""
    made = Synthetic()
    for _ in range(steps):
        with made.step():
            began = made.now
            for name, dims, values in ops:
                with made.inside("cpu_op", name, **{"Input Dims": dims, "Concrete Inputs": list(values)}):
                    made.now += 99
            made.now = began + 999
    return Scene(parse(made.events))


def test_three_projections_save_two_reads_of_their_input():
    m, k, widths = 32 * 128, 256, (256, 64, 64)
    linears = [("aten::linear", [[32, 128, k], [n, k], []], ()) for n in widths]
    loss = "aten::mean", [[32, 128, 64]], ()
    scene = on_cpu(*linears, loss)
    (found,) = separate_projections(scene)
    traffic = 3 * m * k + k * sum(widths) + m * sum(widths)
    assert found.gain_ms == pytest.approx(0.3 * 2 * m * k / traffic) and found.gain_share == pytest.approx(
        found.gain_ms
    )
    assert found.evidence.startswith("3 products a step")
    assert not list(separate_projections(on_cpu(*linears[:2], loss)))


@pytest.mark.parametrize(("rows", "read", "found"), [(100_000, 64, True), (200, 64, False)])
def test_a_tables_gradient_gains_the_rows_that_no_batch_reads(rows, read, found):
    gradient = "aten::embedding_dense_backward", [[read, 8], [read]], ("", "", str(rows), "-1", "False")
    findings = list(dense_gradients(on_cpu(gradient, gradient)))
    assert bool(findings) == found
    for each in findings:
        assert each.gain_ms == pytest.approx(0.2 * (1 - read / rows)) and "2 gradients a step of" in each.evidence


@pytest.mark.parametrize("dearest", [0, 1])
def test_the_line_whose_waits_leave_the_device_idle_longest_is_named_and_all_count(dearest):
    made = Synthetic()
    for number in range(4):
        with made.step():
            made.train_step(number)
            for line in (0, 1):
                with made.inside("python_function", f"train.py({line + 3}): train"):
                    made.call("cudaStreamSynchronize", max(made.free - made.now, 1.0) + (0 if line == dearest else 50))
                made.now += 300 if line == dearest else 30
                made.op("aten::add_", dtype=FP32 if line else BF16, kernel="elementwise_kernel", us=10.0)
    (found,) = host_waits(Scene(parse(made.events)))
    assert f"train.py, from line {dearest + 3}:" in found.where
    assert found.evidence.startswith("2 waits a step") and "when they end the device idles for" in found.evidence
    assert 0.3 < found.gain_ms < 0.5
