import gzip
import json

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from profiling_cases import Spender, VirtualClock, plan, spend, spend_in_backward
from torch import nn
from torch.utils.checkpoint import checkpoint

from helpers.profiling import module_profiler
from helpers.profiling.module_profiler import ModuleProfiler


@pytest.fixture(autouse=True)
def _time_stands_still_unless_spent(monkeypatch):
    monkeypatch.setattr(module_profiler, "HostClock", VirtualClock)


WARMED = plan(0, 1, 1)


class Tree(nn.Module):
    """Runs a plan: a number spends that many milliseconds, in forward and backward; a tree is a module that is called.

    What comes back is added to what went in now and then, so that gradients flow around modules.
    """

    def __init__(self, plan, checkpointed=False):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(()))
        self.plan, self.checkpointed = plan, checkpointed
        self.children_ = nn.ModuleList(Tree(part[1], part[0]) for part in plan if not isinstance(part, int))

    def forward(self, x):
        children = iter(self.children_)
        x = x * self.weight
        for place, part in enumerate(self.plan):
            if isinstance(part, int):
                spend(part)
                x = spend_in_backward(x, 2 * part)
            else:
                child = next(children)
                y = checkpoint(child, x, use_reentrant=False) if child.checkpointed else child(x)
                x = x + y if place % 2 else y
        return x

    def total_ms(self):
        """What it spends in forward, with what it calls."""
        return sum(part for part in self.plan if isinstance(part, int)) + sum(c.total_ms() for c in self.children_)


plans = st.recursive(
    st.lists(st.integers(1, 9), max_size=3),
    lambda inner: st.lists(st.integers(1, 9) | st.tuples(st.booleans(), inner), max_size=4),
    max_leaves=8,
)


def trace(model, path, count=2, schedule=WARMED, x=None):
    x = torch.ones(2, requires_grad=True) if x is None else x
    with ModuleProfiler(model, "net", schedule) as profiler:
        for _ in range(count):
            spend(3)
            model(x).sum().backward(retain_graph=not x.is_leaf)
            spend(4)
            profiler.step()
    profiler.to_perfetto(path)
    return profiler, json.loads(gzip.open(path).read() if path.suffix == ".gz" else path.read_bytes())


def ns(us):
    return round(us * 1000)


def check_tracks(events):
    """Times ascend; on each track a span lies in another or beside it."""
    timed = [event for event in events if event["ph"] != "M"]
    assert [e["ts"] for e in timed] == sorted(e["ts"] for e in timed)
    tracks = {event["tid"]: [] for event in timed if event["ph"] == "X"}
    for event in timed:
        if event["ph"] != "X":
            continue
        begin, end, around = ns(event["ts"]), ns(event["ts"]) + ns(event["dur"]), tracks[event["tid"]]
        while around and around[-1] <= begin:
            around.pop()
        assert begin <= end
        assert not around or end <= around[-1]
        around.append(end)


@settings(deadline=None, max_examples=40)
@given(plan=plans, leaf=st.booleans())
def test_spans_nest_and_times_are_exact_whatever_calls_what(plan, leaf, tmp_path_factory):
    model, x = Tree(plan), torch.ones(2, requires_grad=True)
    profiler, written = trace(model, tmp_path_factory.mktemp("trace") / "trace.json", x=x if leaf else x.exp())
    check_tracks(written["traceEvents"])
    table = profiler.summary().set_index("module")
    inside = set()  # of what is checkpointed
    for name, module in model.named_modules():
        path = f"net.{name}" if name else "net"
        if isinstance(module, Tree):
            if module.checkpointed:
                inside |= {f"{path}.{below}" if below else path for below, _ in module.named_modules()}
            row = table.loc[path]
            assert row.calls == 1
            assert row.forward_ms == pytest.approx(module.total_ms())
            assert row.backward_ms == pytest.approx(2 * module.total_ms())
            assert row.recompute_ms == 0 or path in inside
    assert table.self_ms.drop("step").sum() == pytest.approx(table.self_ms["step"])
    assert table.total_ms["outside"] == pytest.approx(7)


def test_a_trace_has_real_times_and_named_tracks(tmp_path):
    model = nn.Sequential(Spender(10, 20), Spender(5, 8))
    began = VirtualClock.now
    _, written = trace(model, tmp_path / "trace.json", 1, plan(0, 0, 1))
    assert written["baseTimeNanoseconds"] == VirtualClock.unix_ns
    names = {(e["name"], e["tid"]): e["args"] for e in written["traceEvents"] if e["ph"] == "M"}
    assert names["process_name", 0] == {"name": "net on cpu"}
    assert [names["thread_name", track]["name"] for track in (1, 2, 3)] == ["step", "forward", "backward"]
    spans = [(e["cat"], e["name"], ns(e["ts"]) - began, ns(e["dur"])) for e in written["traceEvents"] if e["ph"] == "X"]
    ms = 10**6
    assert spans == [
        ("step", "step 0", 0, 50 * ms),
        ("forward", "net", 3 * ms, 15 * ms),
        ("forward", "net.0", 3 * ms, 10 * ms),
        ("forward", "net.1", 13 * ms, 5 * ms),
        ("backward", "net", 18 * ms, 28 * ms),
        ("backward", "net.1", 18 * ms, 8 * ms),
        ("backward", "net.0", 26 * ms, 20 * ms),
    ]
    assert not any(e["ph"] == "C" for e in written["traceEvents"])


def test_a_name_that_ends_in_gz_is_gzipped_and_the_same_each_time(tmp_path):
    profiler, written = trace(nn.Sequential(Spender(1, 1)), tmp_path / "trace.json.gz")
    assert written["traceEvents"]
    again = profiler.to_perfetto(tmp_path / "again.json.gz")
    assert again.read_bytes() == (tmp_path / "trace.json.gz").read_bytes()
