import gzip
import json
import os
import tracemalloc
from itertools import pairwise
from types import SimpleNamespace

import pytest
import torch
from findings.synthetic import Synthetic, parse
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.profiler import profile, record_function, schedule

from helpers.findings import trace as kinds
from helpers.findings import trace_file
from helpers.findings.account import covered, intersect, length, step_windows, subtract, timeline, union
from helpers.findings.diagnose import diagnose
from helpers.findings.source_places import module, source_line
from helpers.findings.trace_file import read_trace
from helpers.script.stacks import call_sites


def synthetic(steps=3):
    gpu = Synthetic()
    for number in range(steps):
        with gpu.step():
            gpu.train_step(number)
    return gpu.events


@pytest.fixture(scope="module")
def text():
    return json.dumps({"schemaVersion": 1, "record_shapes": 1, "traceEvents": synthetic(), "traceName": "a.json"})


def names(trace):
    return [e.name for e in trace.host + trace.device]


def test_a_gzipped_file_is_read_by_any_name(text, tmp_path):
    (tmp_path / "whole.json").write_text(text)
    (tmp_path / "zipped.txt").write_bytes(gzip.compress(text.encode()))
    assert names(read_trace(tmp_path / "zipped.txt")) == names(read_trace(tmp_path / "whole.json"))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "is empty"),
        (b"hello", "no trace"),
        (b'{"traceEvents": []}', "no trace"),
        (b"\x89PNG\r\n\x1a\n\x00\x00", "no trace"),
        (b'{"traceEvents": [{"ph": "X", "cat": "cpu_op"}, {"ph": "X", "na', "cut off or damaged"),
        (gzip.compress(b"[" * 1000, mtime=0)[:20], "can't be read"),
        (b"[" * 100_000, "damaged: maximum recursion"),
        (b'{"traceEvents": [{"ph": "X", "cat": "cpu_op", "name": "a"}]}', "damaged: 'ts'"),
        (b'{"traceEvents": [{"ph": "X", "name": "a", "ts": 1, "dur": 2}]}', "no op and no kernel"),
        (b'{"traceEvents": [{"ph": "X", "cat": "cpu_op", "name": "a", "ts": 1}]}', "holds no time"),
    ],
)
def test_what_is_no_trace_is_an_error_in_one_line(tmp_path, content, message):
    path = tmp_path / "trace.json"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=message) as error:
        read_trace(path)
    assert "\n" not in str(error.value)


def test_events_of_other_versions_are_read():
    """Times as text, no duration, no arguments, the categories before kineto."""
    raw = [
        {"ph": "X", "cat": "Operator", "name": "ProfilerStep#7", "pid": 1, "tid": 1, "ts": "10.5", "dur": "100.0"},
        {"ph": "X", "cat": "Operator", "name": "aten::mm", "pid": 1, "tid": 1, "ts": 20, "dur": 5, "args": None},
        {"ph": "X", "cat": "Runtime", "name": "cudaLaunchKernel", "pid": 1, "tid": 1, "ts": 21},
    ]
    trace = parse(raw)
    assert [s.name for s in trace.steps] == ["ProfilerStep#7"]
    assert [op.name for op in trace.ops] == ["aten::mm"]


def test_device_time_counts_for_all_that_launched_it():
    trace = parse(synthetic(1))
    forward = next(op for op in trace.ops if op.name == "aten::mm")
    assert forward.device_us == 300
    assert [e.name for e in trace.with_backward([forward])] == [
        "aten::mm",
        "autograd::engine::evaluate_function: MmBackward0",
    ]
    assert sum(e.device_us for e in trace.with_backward([forward])) == 600
    step = next(e for e in trace.host if e.name.startswith(kinds.STEP))
    assert step.device_us == 300 + 50 + 5 + 100  # the backward pass runs in another thread


ticked = st.lists(st.tuples(st.integers(0, 60), st.integers(1, 9)), max_size=8)


@given(ticked, ticked, st.integers(0, 60), st.integers(1, 20))
def test_spans_add_subtract_and_cover_as_sets_of_ticks_do(left, right, begin, us):
    def ticks(spans):
        return {t for b, e in spans for t in range(int(b), int(e))}

    a, b = (union([(begin, begin + d) for begin, d in pairs]) for pairs in (left, right))
    assert ticks(intersect(a, b)) == ticks(a) & ticks(b)
    assert ticks(subtract(a, b)) == ticks(a) - ticks(b)
    assert length(subtract(a, b)) + length(intersect(a, b)) == length(a)
    assert covered(a, begin, begin + us) == len(ticks(a) & set(range(begin, begin + us)))


def test_a_timeline_begins_with_its_step_and_has_every_track():
    trace = parse(synthetic())
    rows = timeline(trace)
    assert set(rows["track"]) == {"annotations", "host", "backward thread", "stream 7"}
    assert rows["begin_ms"].min() >= 0
    assert (rows["end_ms"] >= rows["begin_ms"]).all()


class Inner(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x):
        x = x * 2
        return self.linear(x)  # here


def lines_with(mark):
    with open(__file__) as source:
        return [n for n, line in enumerate(source, 1) if line.rstrip().endswith(f"# {mark}")]


@pytest.fixture(scope="module")
def live():
    model = Inner()
    with profile(with_stack=True, record_shapes=True, schedule=schedule(wait=0, warmup=1, active=2, repeat=1)) as prof:
        for _ in range(3):
            with record_function("mine"):
                model(torch.ones(2, 4)).sum().backward()
            prof.step()
    return prof


def test_a_live_profile_knows_lines_and_modules(live):
    trace = read_trace(live)
    assert len(trace.steps) == 2
    product = next(op for op in trace.ops if op.name == "aten::addmm")
    assert source_line(trace, product).endswith(f"test_trace.py:{lines_with('here')[0]} in forward")
    assert module(product) == "Linear_0"
    product_back = next(op for op in trace.ops if op.name == "aten::mm" and op.backward)
    assert source_line(trace, product_back) == source_line(trace, product)


def test_without_frames_a_place_is_the_users_range_and_the_op():
    model = Inner()
    with profile(record_shapes=True) as prof, record_function("mine"):
        model(torch.ones(2, 4))
    trace = read_trace(prof)
    product = next(op for op in trace.ops if op.name == "aten::addmm")
    assert source_line(trace, product) == "mine: aten::addmm [4, 2×4, 4×4]"


class Before213:
    """A profile as it was before torch 2.13: it can be exported once."""

    def __init__(self, prof):
        self.prof, self.profiler = prof, prof.profiler

    def export_chrome_trace(self, path):
        self.prof.export_chrome_trace(path)


def test_a_profile_of_older_versions_is_read_once_and_then_said_to_be_exported():
    with profile() as prof:
        torch.ones(2) + 1
    assert read_trace(Before213(prof)).ops
    with pytest.raises(ValueError, match=r"exported already.*read the exported file"):
        read_trace(Before213(prof))


def test_a_schedule_that_began_anew_and_recorded_nothing_is_told_what_to_do():
    with profile(schedule=schedule(wait=0, warmup=1, active=1)) as prof:
        for _ in range(2):
            torch.ones(2) + 1
            prof.step()
    with pytest.raises(ValueError, match="repeat=1"):
        read_trace(prof)


def test_every_frame_of_a_live_profile_tells_its_caller_though_exported_times_are_inexact():
    layers = nn.Sequential(*(nn.Linear(4, 4) for _ in range(40)))
    with profile(with_stack=True) as live:
        layers(torch.ones(1, 4))
    frames = [e for e in read_trace(live).host if e.kind == kinds.PYTHON and "Linear" in e.name]
    assert len(frames) == 40
    assert all("Called from" in e.args for e in frames)


class Gone(SimpleNamespace):
    """A call of code that is gone: the bytes of its name are something else by now."""

    @property
    def name(self):
        raise UnicodeDecodeError("utf-8", b"\xa0", 0, 1, "invalid start byte")


def test_names_of_code_that_is_gone_are_left_out():
    caller = SimpleNamespace(file_name="loop.py", line_number=3, function_name="train")
    call = {"children": (), "start_time_ns": 2000, "extra_fields": SimpleNamespace(caller=caller)}
    calls = [Gone(**call), SimpleNamespace(name="step", **call)]
    site_of = call_sites(SimpleNamespace(experimental_event_tree=lambda: calls), 0)
    assert site_of("step", 2.0) == "loop.py(3): train"


def test_a_file_that_unpacks_to_more_than_fits_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(trace_file, "LARGEST", 10_000)
    (tmp_path / "bomb.json.gz").write_bytes(gzip.compress(b" " * 50_000_000))
    (tmp_path / "large.json").write_bytes(b" " * 20_000)
    for name in ("bomb.json.gz", "large.json"):
        tracemalloc.start()
        with pytest.raises(ValueError, match="is larger than"):
            read_trace(tmp_path / name)
        assert tracemalloc.get_traced_memory()[1] < 1_000_000
        tracemalloc.stop()


@pytest.mark.parametrize("device", ["fifo", "/dev/zero"])
def test_a_trace_that_would_never_begin_or_end_is_refused(tmp_path, device):
    os.mkfifo(tmp_path / "fifo")
    with pytest.raises(ValueError, match="can't be read as a trace: not a regular file"):
        read_trace(tmp_path / device)


def test_what_was_observed_may_be_damaged(text, tmp_path):
    (tmp_path / "costs.json").write_text(text)
    (tmp_path / "observed.json").write_text("{")
    with pytest.raises(ValueError, match=r"damaged observed.*delete it, or profile again"):
        diagnose(tmp_path)


def test_steps_are_those_of_the_device_from_one_steps_first_kernel_to_the_nexts():
    """The host is three steps ahead, whose copies begin before their kernels."""
    gpu = Synthetic()
    for _ in range(4):
        with gpu.step():
            gpu.op("aten::copy_", copy="Memcpy HtoD (Pinned -> Device)", us=100.0)
            gpu.op("aten::mm", kernel="gemm", us=900.0)
    trace = parse(gpu.events)
    firsts = [event.begin for event in trace.device if event.name == "gemm"]
    assert step_windows(trace) == list(pairwise(firsts))
