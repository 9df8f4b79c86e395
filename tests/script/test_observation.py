"""The unprofiled loop: which line its wall time goes to, and what no operator shows."""

import gc
import gzip
import json
import math
import os
import sys
import textwrap
import threading
import time
from collections import Counter
from dataclasses import replace
from types import SimpleNamespace

import hypothesis.strategies as st
import pytest
import torch
from findings.synthetic import Synthetic
from hypothesis import given
from script.recorded import watch
from torch import nn

from helpers.findings.caveats import loop_notes, loop_text, loop_warnings
from helpers.findings.diagnose import diagnose
from helpers.findings.loop import Loop, growth
from helpers.findings.rules import unrecorded
from helpers.findings.rules.unrecorded import costly_line, garbage_collection, loop_findings, ranked
from helpers.findings.summary import ESTIMATE, Finding
from helpers.lab.machine import OthersLoad
from helpers.script import windows
from helpers.script.calls import Calls
from helpers.script.cores import CoreWait
from helpers.script.monitor import Monitor, compilation
from helpers.script.observation import LineTime, Observation
from helpers.script.running import run_script
from helpers.script.stacks import (
    BACKWARD,
    COMPUTING,
    EVALUATING,
    LOADING,
    functions_around,
    has_ended,
    is_library,
    line_at,
    line_of,
    look_at,
    place,
    read_stack,
)
from helpers.script.tensors import padded_positions

HEAD = """
import time, torch
from torch import nn
torch.set_num_threads(1)
model = nn.Linear(64, 64)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
def train():
    optimizer.zero_grad()
    model(torch.randn(8, 64)).square().mean().backward()
    optimizer.step()
"""


@pytest.fixture
def watched(tmp_path, monkeypatch):
    """The diagnosis of a script that begins with HEAD, observed for 20 iterations and at least half a second.

    Slow iterations, of which a busy machine has some, are not waited for.
    """
    monkeypatch.chdir(tmp_path)
    for name, value in {"OBSERVED_S": 0.5, "SLOW_SEEN": math.inf, "SLOW_SHARE": math.inf}.items():
        monkeypatch.setattr(windows, name, value)

    def run(body, **options):
        (tmp_path / "train.py").write_text(HEAD + textwrap.dedent(body))
        return diagnose(watch("train.py", **options).folder)

    return run


def named(diagnosis, finding):
    """The first finding, but for slow steps, of which a busy machine has some."""
    first = next(found for found in diagnosis.findings if found.finding != "slow steps")
    assert first.finding == finding
    return first


@pytest.mark.long
def test_what_a_loop_does_beside_training_is_named_by_its_line(watched, monkeypatch):
    monkeypatch.setattr(OthersLoad, "__exit__", lambda *_: time.sleep(0.2))  # after the script
    diagnosis = watched(
        """
        took = 0.0  # an iteration on this machine: what waits does so for a part of that
        class Slow(torch.utils.data.Dataset):
            def __len__(self): return 10**6
            def __getitem__(self, i):
                time.sleep(took / 64)
                return torch.randn(64)
        def look():
            model.eval()
            with torch.no_grad():
                for _ in range(200):
                    model(torch.randn(64, 64))
            model.train()
        def numbers():
            return [round(i * 0.1, 1) for i in range(100_000)]
        began = time.perf_counter()
        for batch in torch.utils.data.DataLoader(Slow(), batch_size=4):
            train()
            torch.save(torch.zeros(1_500_000), 'model.pt'); time.sleep(0)
            look()
            numbers()
            time.sleep(took / 10)
            took, began = time.perf_counter() - began, time.perf_counter()
        """
    )
    assert all("train.py:" in line.where for line in diagnosis.lines)
    where = {finding.finding: finding.where for finding in diagnosis.findings}
    assert "train.py:" in where["checkpoints"] and "torch.save" in where["checkpoints"]
    assert "model(torch.randn(64, 64))" in where["evaluation"]
    assert "round(i * 0.1, 1)" in where["Python loop"]
    assert "time.sleep(took / 64)" in where["waiting for the loader"]
    waits = next(line for line in diagnosis.lines if "time.sleep(took / 10)" in line.source)
    assert waits.share > 0.05 and "time.sleep(took / 10)" in f"{diagnosis}"


@pytest.mark.long
@pytest.mark.parametrize("apart", [False, True])
def test_gradients_that_ranks_average_for_each_micro_batch_are_found(watched, tmp_path, apart):
    diagnosis = watched(
        f"""
        import contextlib
        store = "file://{tmp_path}/store"
        torch.distributed.init_process_group("gloo", init_method=store, rank=0, world_size=1)
        replica = nn.parallel.DistributedDataParallel(model, find_unused_parameters={not apart})
        try:
            while True:
                optimizer.zero_grad()
                for part in range(4):
                    with replica.no_sync() if {apart} and part < 3 else contextlib.nullcontext():
                        replica(torch.randn(8, 64)).square().mean().backward()
                optimizer.step()
        finally:
            torch.distributed.destroy_process_group()
        """
    )
    found = [f for f in diagnosis.findings if f.finding == "gradients averaged too often"]
    assert bool(found) is not apart
    for each in found:  # the last iteration may have ended within it
        assert each.where.startswith("train.py:") and float(each.evidence.split()[0]) == pytest.approx(4, rel=0.1)
    assert ("unused parameters" in [warning.kind for warning in diagnosis.warnings]) is not apart


def test_a_pause_that_no_look_fell_into_is_not_charged():
    monitor = Monitor()
    monitor.start()
    before, started = sum(monitor.seconds.values()), time.perf_counter()
    switched = sys.getswitchinterval()
    sys.setswitchinterval(10.0)  # the monitor gets no turn while this thread computes
    try:
        with monitor.looking_away():
            began = time.perf_counter()
            while time.perf_counter() - began < 0.3:
                pass
    finally:
        sys.setswitchinterval(switched)
    time.sleep(0.05)
    monitor.stop()
    assert sum(monitor.seconds.values()) - before < time.perf_counter() - started - 0.25


def test_a_worker_that_is_waited_for_is_named_by_its_line(watched):
    diagnosis = watched(
        """
        class Slow(torch.utils.data.Dataset):
            def __len__(self): return 10**6
            def __getitem__(self, i):
                time.sleep(0.03)
                return torch.randn(64)
        for batch in torch.utils.data.DataLoader(Slow(), batch_size=2, num_workers=1):
            train()
        """
    )
    first = named(diagnosis, "waiting for the loader")
    assert first.gain_share > 0.1
    assert "time.sleep(0.03)" in first.where and "workers' time" in first.evidence


def test_threads_that_each_worker_sets_are_named_by_the_line_that_does(watched):
    diagnosis = watched(
        """
        class Slow(torch.utils.data.Dataset):
            def __len__(self): return 10**6
            def __getitem__(self, i):
                time.sleep(0.03)
                return torch.randn(64)
        def begin(number):
            torch.set_num_threads(64)
        loader = torch.utils.data.DataLoader(Slow(), batch_size=2, num_workers=1, worker_init_fn=begin)
        for batch in loader:
            train()
        """
    )
    first = named(diagnosis, "workers on the step's cores")
    assert "64 threads" in first.evidence
    assert first.where.endswith("torch.set_num_threads(64)")


def test_the_limit_ends_a_script_that_would_be_watched_for_longer(watched, monkeypatch):
    monkeypatch.setattr(windows, "OBSERVED", 10**9)
    began = time.perf_counter()
    assert watched("while True: train()", limit=2.0).steps >= 1
    assert time.perf_counter() - began > 2.0


@pytest.mark.long
def test_a_step_that_calls_a_closure_updates_only_after_its_backward(watched):
    diagnosis = watched(
        """
        def closure():
            optimizer.zero_grad()
            loss = model(torch.randn(20_000, 64)).square().mean()
            loss.backward()
            return loss
        while True:
            optimizer.step(closure)
        """
    )
    assert diagnosis.host["optimizer"] < 0.2 < diagnosis.host["operators"]


@pytest.mark.long
def test_an_update_rule_of_its_own_ends_iterations_by_its_backward(watched):
    diagnosis = watched(
        """
        del optimizer
        while True:
            model(torch.randn(8, 64)).square().mean().backward()
            with torch.no_grad():
                for p in model.parameters():
                    p -= 0.1 * p.grad
                    p.grad = None
        """
    )
    assert diagnosis.steps >= 1


def test_what_was_seen_is_told_without_a_profile():
    told = "\n".join(loop_text(Loop(seen(line(COMPUTING, 1.0), line("saving", 3.0, 4)))))
    assert "10 iterations were seen" in told and "75%  train.py:4" in told and "checkpoints: up to" in told
    assert loop_text(Loop(seen(iterations=0))) == []


@given(
    lengths=st.lists(st.integers(1, 20), min_size=2, max_size=8).filter(lambda n: len(set(n)) > 1), left=st.booleans()
)
def test_padded_positions_are_those_beyond_the_lengths(lengths, left):
    width = max(lengths) + 3
    ids = torch.zeros(len(lengths), width, dtype=torch.long)
    for row, length in enumerate(lengths):
        ids[row, :length] = torch.arange(1, length + 1)
    ids = ids.flip(1) if left else ids
    positions, padded, shared = padded_positions(ids)
    assert positions == ids.numel()
    assert padded == sum(width - length for length in lengths)
    assert shared == 3 * len(lengths)


@pytest.mark.parametrize(
    ("ids", "padding"),
    [
        (torch.zeros(4, 8, dtype=torch.long), None),
        (torch.arange(8), None),
        (torch.randn(4, 8), None),
        (torch.stack([torch.arange(16).roll(n) for n in range(4)]), (64, 0, 0)),
    ],
    ids=["token types", "positions", "numbers", "tokens"],
)
def test_what_is_no_batch_of_padded_tokens_has_no_padding(ids, padding):
    assert padded_positions(ids) == padding


def line(activity, seconds, number=1, calls=0):
    return LineTime("/home/me/train.py", number, "train", activity, seconds, calls)


def seen(*lines, iterations=10, **others):
    return Observation(
        **{
            "seconds": sum(each.seconds for each in lines),
            "iterations": [sum(each.seconds for each in lines) / max(iterations, 1)] * iterations,
            "lines": list(lines),
            "epochs": 1,
            "evaluations": 2,
            "backwards": iterations,
        }
        | others
    )


def test_where_a_compiled_graph_breaks_is_told_and_what_compiling_took(tmp_path):
    script = tmp_path / "model.py"
    script.write_text("def f(x):\n    y = x.sin()\n    print(end='')\n    return y.cos()\n")
    torch._dynamo.reset()
    torch._dynamo.utils.clear_compilation_metrics()
    torch._dynamo.utils.graph_break_reasons.clear()
    variables = {}
    exec(compile(script.read_text(), str(script), "exec"), variables)
    fn = torch.compile(variables["f"], backend="eager", dynamic=False)
    fn(torch.ones(2)), fn(torch.ones(3))
    data = compilation()
    assert [at[1] for at in data["breaks"] if at[0] == str(script)] == [3] and any(
        "size mismatch" in why for why in data["again"]
    )
    loop = Loop(seen(line(COMPUTING, 5.0), compiled=data))
    (broken,) = [note.text for note in loop_warnings(loop) if note.kind == "graph breaks"]
    assert "model.py:3  print(end='')" in broken and "builtin" in broken
    assert any("torch.compile took" in note.text and "again" in note.text for note in loop_notes(loop))


def test_a_function_that_breaks_within_a_loop_is_told_to_run_uncompiled(tmp_path):
    script = tmp_path / "looping.py"
    script.write_text("def f(x):\n    for _ in range(2):\n        x = x * x.sum().item()\n    return x\n")
    torch._dynamo.reset()
    variables = {}
    exec(compile(script.read_text(), str(script), "exec"), variables)
    torch.compile(variables["f"], backend="eager")(torch.ones(2))
    (where,) = [at for at in compilation()["breaks"] if at[0] == str(script)]
    assert where[1] == 3 and "all of f runs uncompiled" in where[2]


def test_padding_costs_its_share_of_what_computes():
    (found,) = loop_findings(Loop(seen(line(COMPUTING, 5.0), line(EVALUATING, 0.0), padding=[100, 60, 40])), 0.01)
    assert found.finding == "padding" and found.gain_share == pytest.approx(0.6)
    assert "60%" in found.evidence and "40%" in found.evidence


def test_what_is_collected_is_named_by_what_is_kept_or_by_the_line_at_which_most_of_it_begins():
    def collected(**others):
        (found,) = garbage_collection(Loop(seen(line(COMPUTING, 9.0), garbage_s=2.0, **others)))
        return found.where, found.advice

    assert collected(collected=[["/home/me/model.py", 5, 0.9]])[0] == "wherever objects are made"
    assert collected(collected=[["/home/me/model.py", 5, 1.9]])[0] == "model.py:5"
    kept = ["/home/me/train.py", 4, 300, False, 9e3]
    assert collected(collected=[["/home/me/model.py", 5, 1.9]], growing=[[*kept, False]])[0] == "model.py:5"
    where, advice = collected(collected=[["/home/me/model.py", 5, 1.9]], growing=[[*kept, True]])
    assert where == "train.py:4" and "keep the last" in advice


def test_a_collection_is_charged_to_the_line_that_began_it():
    monitor = Monitor()
    monitor.start()
    with monitor.watching():
        gc.collect()
    assert [place(*line) for line in monitor.collected] == [place(__file__, line_of(sys._getframe()) - 1)]


def test_a_line_that_keeps_the_interpreters_lock_gets_its_own_time():
    def work():
        until, rows, row = time.perf_counter() + 1.0, [[0.5] * 200] * 200, [0.5] * 200
        while time.perf_counter() < until:
            torch.tensor(rows)
            torch.tensor(row)
            torch.tensor(row)

    monitor = Monitor()
    monitor.start()
    with monitor.watching():
        work()
    seconds = Counter()
    for (_, ((code, number), *_)), taken in monitor.seconds.items():
        seconds[number - code.co_firstlineno] += taken if code is work.__code__ else 0.0
    assert seconds[3] > 0.9 * seconds.total()


def test_backward_passes_of_one_graph_and_of_micro_batches_are_told_apart():
    lines = line(COMPUTING, 1.0), line("backward", 4.0, 2)
    (twice,) = loop_findings(Loop(seen(*lines, backwards=20, retained=10)), 0.01)
    assert (twice.finding, twice.gain_share) == ("repeated backward", pytest.approx(0.4))
    (many,) = loop_findings(Loop(seen(*lines, backwards=160)), 0.01)
    assert many.finding == "small batches" and "16 micro-batches" in many.evidence


def test_a_line_that_computes_long_is_named_unless_it_multiplies_matrices_or_a_finding_explains_it():
    lines = line(COMPUTING, 5.0, 1), line(COMPUTING, 3.0, 2), line(COMPUTING, 1.0, 3), line("backward", 1.0)
    loop = Loop(seen(*lines))

    def costly(products, findings=()):
        return [(found.where, found.gain_share) for found in costly_line(loop, products, list(findings))]

    assert costly({"train.py:1": 0.1}) == [("train.py:1", pytest.approx(0.9))]
    assert costly({"train.py:1": 0.6}) == [("train.py:2", pytest.approx(0.4))]
    assert costly({"train.py:1": 0.6, "train.py:2": 0.6}) == []
    explains = Finding("one-hot product", "operators", 1.0, 0.4, "train.py:1 in train", "", "", ESTIMATE)
    assert costly({}, [replace(explains, gain_share=0.5)]) == [] != costly({}, [explains])
    small = replace(explains, finding="small operators", where="other.py:5", gain_share=0.8)
    assert costly({"train.py:1": 0.1}, [small]) == [] != costly({}, [small])  # no operator is called there
    collects = Loop(seen(*lines, collected=[[lines[0].file, 1, 4.0]]))
    assert not [*costly_line(collects, {}, [replace(explains, finding="garbage collection", where="", gain_share=0.5)])]
    (spread,) = costly_line(Loop(seen(*(line(COMPUTING, 1.0, number) for number in (4, 9, 6)))), {}, [])
    assert spread.evidence.endswith("; lines 4 to 9")
    back = line(COMPUTING, 4.0, 1), line("backward", 6.0)
    assert [*costly_line(Loop(seen(*back)), {}, [])]
    assert not [*costly_line(Loop(seen(*back), {("train.py", back[0].function): 0.9}), {}, [])]


def test_a_loop_counts_with_its_backward_pass():
    lines = line(COMPUTING, 0.6, 1), line(COMPUTING, 5.4, 2), line("backward", 4.0)
    found = {"file": "/home/me/train.py", "line": 1, "function": "scan", "passes": 1000, "module": "", "seconds": 0.6}
    loops = [found | {"functions": [["/home/me/train.py", "scan"]]}]
    assert not loop_findings(Loop(seen(*lines, loops=loops)), 0.01)
    (counted,) = loop_findings(Loop(seen(*lines, loops=loops), {("train.py", "scan"): 0.5}), 0.01)
    assert counted.finding == "Python loop" and counted.gain_share == pytest.approx(0.26)


@pytest.mark.long
def test_a_line_of_no_known_kind_comes_first_and_a_models_own_doesnt(watched):
    body = """
        values, large = torch.rand(400_000), nn.Linear(2048, 2048)
        while True:
            {line}
            train()
        """
    diagnosis = watched(body.format(line="values.quantile(0.9)"))
    assert diagnosis.findings[0].finding == "costly line" and "train.py:14 " in diagnosis.findings[0].where
    assert "Change first: costly line, up to" in diagnosis.verdict and "train.py:14 " in diagnosis.verdict
    model = watched(body.format(line="large(torch.ones(512, 2048))"))
    assert "costly line" not in {finding.finding for finding in model.findings}


@pytest.mark.long
def test_weights_that_get_gradients_and_have_no_optimizer_are_named(watched):
    body = """
        class Teacher(nn.Module):
            def __init__(self):
                super().__init__()
                self.layer = nn.Linear(64, 64)
        teacher = Teacher().requires_grad_({trained})
        def train():
            optimizer.zero_grad()
            (model(torch.randn(8, 64)) - teacher.layer(torch.randn(8, 64))).square().mean().backward()
            optimizer.step()
        while True: train()
        """
    named = {each.finding: each for each in watched(body.format(trained=True)).findings}[
        "gradients without an optimizer"
    ]
    assert named.where == "weights of Teacher" and "2 weights get gradients, 50% of all" in named.evidence
    assert "gradients without an optimizer" not in {
        each.finding for each in watched(body.format(trained=False)).findings
    }


def test_of_what_gradients_pass_through_to_adapters_half_remains():
    for passed, share in ((False, 0.8), (True, 0.4)):
        seen_so = seen(line(BACKWARD, 0.8), line(COMPUTING, 0.2), unclaimed=["Bert", 9, 1.0, passed])
        (named,) = loop_findings(Loop(seen_so), 0.01)
        assert named.finding == "gradients without an optimizer" and named.gain_share == pytest.approx(share)


def test_others_at_work_are_a_warning():
    (warning,) = loop_warnings(Loop(seen(line(COMPUTING, 1.0), others=1.4)))
    assert "took 1.4 cores" in warning.text
    assert loop_warnings(Loop(seen(line(COMPUTING, 1.0), others=0.1))) == []


@pytest.mark.long
def test_switches_are_named_by_the_line_that_set_them(watched, monkeypatch):
    monkeypatch.setenv("PYTORCH_JIT", "0")
    body = """
        torch.use_deterministic_algorithms("a" != "b")
        while True:
            {context}: train()
        """
    try:
        plain = watched(body.format(context="if True"))
        checked = watched(body.format(context="with torch.autograd.detect_anomaly(check_nan=True)"))
    finally:
        torch.use_deterministic_algorithms(False)
    where = {finding.finding: finding.where for finding in checked.findings}
    assert "train.py:14  with torch.autograd.detect_anomaly" in where["anomaly detection"]
    assert "anomaly detection" not in {finding.finding for finding in plain.findings}
    warned = {warning.kind: warning.text for warning in plain.warnings}
    assert 'train.py:12  torch.use_deterministic_algorithms("a" != "b")' in warned["deterministic algorithms"]
    assert "PYTORCH_JIT=0: scripted functions run in Python" in warned["environment"]


def test_fewer_iterations_than_that_prove_nothing():
    assert loop_findings(Loop(seen(line(COMPUTING, 5.0, calls=5000), iterations=2)), 0.0) == []


def test_memory_that_grows_is_a_warning_unless_it_is_known_what_keeps_it_and_soon_full():
    grows = [[n, 10**9 + n * 10 * 2**20, 0] for n in range(20)]
    assert "10.0 MiB an iteration" in growth(grows, 0)[0]
    assert growth([[n, 10**9 + (n % 3) * 10**8, 0] for n in range(20)], 0) == ("", 0.0, 0.0)
    loop = seen(line(COMPUTING, 1.0), line(EVALUATING, 0.1), memory=grows, available=10**10)
    assert [warning.kind for warning in loop_warnings(Loop(loop))] == ["growing memory"]
    assert loop_findings(Loop(loop), 0.5) == []
    kept = Loop(replace(loop, growing=[["/home/me/train.py", 4, 300, True, 0.0, True]]))
    (found,) = loop_findings(kept, 0.5)
    assert found.finding == "growing memory" and found.urgent and found.where == "train.py:4"
    assert "300 items" in found.evidence and "detach" in found.advice and loop_warnings(kept) == []
    first_pass = Loop(replace(kept.observation, epochs=0, lines=[*loop.lines, line(LOADING, 0.1)]))
    assert not any(each.urgent for each in loop_findings(first_pass, 0.0))
    assert "train.py:4" in loop_warnings(first_pass)[0].text
    other = Finding("padding", "observed", 1.0, 0.5, "", "", "", ESTIMATE)
    assert ranked([other, found])[0] is found and ranked([other, replace(found, urgent=False)])[0] is other
    most = replace(other, gain_share=0.75)
    assert ranked([found, most])[0] is most, "what takes three quarters of the time comes first"


def test_the_list_that_keeps_memory_is_named_by_the_line_that_adds_to_it(watched, monkeypatch):
    monkeypatch.setattr(unrecorded, "growth", lambda *_: ("memory grows by 5 MiB an iteration", 5 * 2**20, 100.0))
    body = """
        history = []
        class Meter:
            def update(self, value): history.append(value)
        while True:
            train()
            for _ in range(3): [].append(torch.zeros(2))
            Meter().update(model(torch.randn(200, 64)))
        """
    (growing,) = [each for each in watched(body).findings if each.finding == "growing memory"]
    assert "train.py:14  def update(self, value): history" in growing.where
    assert "keep loss.detach()" in growing.advice


def calling(frame):
    return [(frame.f_code, frame.f_lasti), *calling(frame.f_back)] if frame else []


def test_what_runs_around_the_steps_is_no_evaluation_whatever_its_name():
    def run_train_validation_loop():
        return sys._getframe()

    frame = run_train_validation_loop()
    assert read_stack(calling(frame))[0] == EVALUATING
    assert read_stack(calling(frame), {*functions_around(frame)})[0] == COMPUTING
    assert (
        read_stack(calling(frame), learns=True)[0] == COMPUTING
    )  # as a policy's `evaluate`, whose result is trained on


def test_destructors_after_the_script_are_not_the_scripts():
    seen = []

    class Noisy:
        def __del__(self):
            seen.append(has_ended(calling(sys._getframe())))

    sys.modules["noisy"] = SimpleNamespace(Noisy=Noisy)
    script = "import noisy\nnoisy.Noisy()\nkept = noisy.Noisy()"
    try:
        run_script(compile(script, __file__, "exec"), ["train.py"])
    finally:
        del sys.modules["noisy"]
    assert seen == [False, True]


def test_a_loop_is_named_by_the_line_that_takes_its_time_and_not_by_its_head():
    def draw(known):
        chosen = 0
        while chosen < 40:
            if chosen - 50_000 not in known:  # all of them are compared
                chosen += 1

    calls, first = Calls(), draw.__code__.co_firstlineno
    with calls.counted(lambda frame, function: None):
        draw(list(range(50_000)))
    (loop,) = calls.loops({(COMPUTING, ((draw.__code__, first + 2),)): 1.0})
    assert loop["line"] == first + 3


def test_a_loader_that_begins_anew_for_each_batch_is_named_by_its_line(watched):
    found = watched(
        """
        data = torch.utils.data.TensorDataset(torch.randn(30_000, 64))
        while True:
            batch = next(iter(torch.utils.data.DataLoader(data, batch_size=8, shuffle=True)))
            train()
        """
    ).findings
    (where,) = (each.where for each in found if each.finding == "new loader each batch")
    assert "train.py:14  batch = next(iter(" in where


@pytest.mark.long
def test_a_clock_of_the_scripts_that_holds_the_first_iteration_is_told_of(watched):
    diagnosis = watched(
        """
        began, count = time.time(), 0
        time.sleep(4)  # as compiling does
        while True:
            train()
            count += 1
            rate = count / (time.time() - began)
        """
    )
    (told,) = (note.text for note in diagnosis.notes if note.kind == "clock")
    assert "(train.py:12 to train.py:17)" in told and "contains the first iteration" in told


def test_an_optimizer_gains_at_most_what_its_steps_take_in_the_watched_loop(tmp_path):
    model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(50)))
    optimizer = torch.optim.AdamW(model.parameters())
    with torch.profiler.profile() as profile:
        for _ in range(3):
            model(torch.randn(4, 8)).square().mean().backward()
            optimizer.step()
    profile.export_chrome_trace(str(tmp_path / "costs.json.gz"))
    gain = {f.finding: f.gain_share for f in diagnose(tmp_path).findings}["unfused optimizer"]
    for lines, most in (([line("optimizer", 0.1)], 0.01), ([line("optimizer", 9.0)], gain)):
        loop = seen(*lines, line(COMPUTING, 9.9 - lines[0][4], 2))
        loop.write(tmp_path / "observed.json")
        capped = {f.finding: f.gain_share for f in diagnose(tmp_path).findings}.get("unfused optimizer", 0.0)
        assert capped <= most + 1e-3


def test_a_model_trains_the_same_while_it_is_watched():
    embed, mode = nn.Embedding.forward, nn.Module.train
    with Monitor().watching():
        assert nn.Embedding(4, 2)(torch.tensor([[1, 2], [3, 3]])).shape == (2, 2, 2)
    assert nn.Embedding.forward is embed and nn.Module.train is mode
    assert Monitor().observation().iterations == []


def test_padding_is_looked_at_a_few_times_and_never_in_a_recorded_iteration():
    """On a GPU each look waits for the device."""
    monitor, embedding = Monitor(), nn.Embedding(4, 2)
    padded, constant = torch.tensor([[1, 2, 0], [3, 0, 0]]), torch.zeros(2, 3, dtype=torch.long)
    with monitor.watching():
        monitor.count = 1
        embedding(padded)  # before it starts, and in a window, it looks away
        assert not monitor.looks
        monitor.away = 0
        for _ in range(20):
            embedding(padded)
        assert len(monitor.padding) == monitor.looks < 20
        monitor.padding.clear()
        for _ in range(100):
            embedding(constant)  # types of tokens, which have no padding
        assert not monitor.padding and monitor.looks < 50


def test_a_loop_of_the_hosts_on_a_gpu_promises_no_more_than_the_device_idles(tmp_path):
    gpu = Synthetic()
    for number in range(4):
        with gpu.step():
            gpu.train_step(number)
            gpu.call("cudaStreamSynchronize", max(gpu.free - gpu.now, 1.0))
            gpu.now += 300  # the device idles for the host
    (tmp_path / "costs.json.gz").write_bytes(gzip.compress(json.dumps({"traceEvents": gpu.events}).encode()))
    loop = seen(line(COMPUTING, 9.0, calls=1000), line("backward", 1.0, 2))  # 90% of the host's time, waits included
    loop.write(tmp_path / "observed.json")
    diagnosis = diagnose(tmp_path)
    found = next(finding for finding in diagnosis.findings if finding.finding == "Python loop")
    assert found.gain_share == pytest.approx(diagnosis.account["idle"]) and 0.05 < found.gain_share < 0.6
    assert found.gain_ms == pytest.approx(found.gain_share * 1000)


def test_what_inductor_writes_is_not_the_users_code():
    written = "/tmp/torchinductor_me/fv/cfvyrmqvxe2yeialcpsu7xlbs6xefgd5rsa6mjwycewdrpeq2jca.py"  # named by its hash
    assert is_library(written) and not is_library("/home/me/car.py")


def test_a_look_during_which_the_thread_went_on_is_made_anew(monkeypatch):
    """Its frames would tell where their functions ended."""

    def one():
        return sys._getframe()

    def another():
        return sys._getframe()

    last = another()
    frames = iter([one(), another(), another(), one(), last, last])
    monkeypatch.setattr(sys, "_current_frames", lambda: {1: next(frames)})
    assert look_at(1)[0] == (last.f_code, last.f_lasti)
    monkeypatch.setattr(sys, "_current_frames", lambda: {1: one()})
    assert look_at(1) == look_at(2) == []


def test_a_look_finds_the_lines_of_frames():
    waits, goes_on = threading.Event(), threading.Event()

    def waiting():
        waits.set()
        goes_on.wait()

    thread = threading.Thread(target=waiting)
    thread.start()
    waits.wait()
    while not (found := look_at(thread.ident)) or found[0][0].co_name != "wait":
        pass
    frame, lines = sys._current_frames()[thread.ident], []
    while frame is not None:
        lines.append(line_of(frame))
        frame = frame.f_back
    goes_on.set()
    assert [line_at(code, at) for code, at in found][-4:] == lines[-4:]  # the innermost may have gone on a little


def test_a_frame_between_two_lines_counts_as_its_functions_first():
    frame = SimpleNamespace(f_lineno=None, f_code=SimpleNamespace(co_firstlineno=7))
    assert line_of(frame) == 7


def test_a_thread_that_has_ended_waits_for_no_core():
    core, native = CoreWait(), []
    thread = threading.Thread(target=lambda: native.append(threading.get_native_id()) or core.begin(native[0]))
    thread.start()
    thread.join()
    while os.path.exists(f"/proc/self/task/{native[0]}"):  # the kernel may take a moment longer
        time.sleep(0.001)
    assert core.passed() == 0
