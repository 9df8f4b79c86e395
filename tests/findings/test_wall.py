"""The account of the wall time: kinds of iterations, what explains each, and rules for what lies outside of a step."""

from dataclasses import replace

import pytest
import torch
from findings.made_up import LAUNCHES, diagnosis
from findings.synthetic import Synthetic, parse
from torch import nn
from torch.profiler import profile

from helpers.findings.diagnose import _with_wall
from helpers.findings.loop import Loop
from helpers.findings.page import page
from helpers.findings.rules.formed_weights import forming_lines
from helpers.findings.rules.host_work import filled_tensors
from helpers.findings.rules.unrecorded import loop_findings, ranked
from helpers.findings.rules.wall import busy_cores, slow_iterations
from helpers.findings.scene import Scene
from helpers.findings.trace_file import read_trace
from helpers.script.iterations import (
    BEGAN,
    EPOCHS,
    NO_CORE,
    ORDINARY,
    PHASE,
    RECORDED,
    SLOW,
    Iterations,
    innermost,
    wall_time,
)
from helpers.script.observation import LineTime, Observation
from helpers.script.stacks import BACKWARD, COMPUTING, DATASET, EVALUATING, LOADING, RECOMPUTING


def train():
    "A function whose code a made-up stack may hold."


def line(activity, seconds, number=1, function="train"):
    return LineTime("/home/me/train.py", number, function, activity, seconds, 0)


def observed(*lines, **others):
    seconds = sum(each.seconds for each in lines)
    return Observation(seconds=seconds, iterations=[seconds / 10] * 10, lines=list(lines), epochs=1, **others)


def iterations(*took, marks=None, waited=0.0):
    held, now = Iterations(), 0.0
    for number, seconds in enumerate(took):
        now += seconds
        held.add(now, seconds, (marks or {}).get(number, 0), waited=waited)
    return held


def wall(held, stacks=None):
    return wall_time(held, held.kinds({}), stacks or {})


def test_shares_of_all_kinds_add_up_to_the_wall_time():
    took = [*[0.01] * 40, 1.0, *[0.011] * 30, 0.5, *[0.01] * 20, 7.0, 0.01]
    held = iterations(*took, marks={71: BEGAN, 92: RECORDED}, waited=0.001)
    whole = wall(held)
    assert whole["seconds"] == pytest.approx(sum(took) - 7.0) and whole["recorded_s"] == 7.0
    assert {row["kind"]: row["count"] for row in whole["kinds"]} == {ORDINARY: 93, SLOW: 1, EPOCHS: 1, NO_CORE: 93}
    kinds = Loop(observed(line(COMPUTING, 1.0), wall=whole)).kinds
    assert sum(kind.share for kind in kinds) == pytest.approx(1.0)
    assert {kind for *_, kind in whole["points"]} == {ORDINARY, SLOW, EPOCHS, ""}


def test_iterations_of_unlike_lengths_are_all_ordinary():
    lengths = [0.01 * (1 + number % 7) for number in range(200)]
    assert {row["kind"] for row in wall(iterations(*lengths))["kinds"]} == {ORDINARY, NO_CORE}


def test_a_line_of_slow_iterations_is_a_finding_with_how_often_they_come_and_leads():
    code = train.__code__
    stacks = {SLOW: {(COMPUTING, ((code, 33), (code, 30))): 2.0}, ORDINARY: {(COMPUTING, ((code, 31),)): 0.4}}
    loop = Loop(observed(line(COMPUTING, 2.4), wall=wall(iterations(*[0.01] * 39, 1.0, *[0.01] * 39, 1.0), stacks)))
    (slow,) = slow_iterations(loop)
    assert slow.finding == "slow steps" and slow.where.startswith("test_wall.py:33")
    assert "1 iteration in 40 takes 1,000 ms, others 10 ms" in slow.evidence
    of_steps = replace(LAUNCHES, gain_share=0.9)
    assert ranked([of_steps, slow], loop.ordinary)[0] is slow, "an ordinary step's rule can't lead there"
    account = _with_wall(diagnosis(), loop, [of_steps, slow]).wall
    assert sum(kind.unexplained + sum(share for _, share in kind.findings) for kind in account.kinds) == pytest.approx(
        1
    )


def test_what_no_finding_explains_is_said_with_its_iterations():
    loop = Loop(observed(line(COMPUTING, 2.4), wall=wall(iterations(*[0.01] * 39, 1.0, *[0.01] * 39, 1.0))))
    assert "71% in slow steps whose cause wasn't seen: 1 iteration in 40" in _with_wall(diagnosis(), loop, []).verdict


CORES = {"cores": 2, "main": 0.6, "threads": 0.0, "waited": 0.4, "workers": [0.7, 0.7], "children": 0.0, "others": 0.0}


def test_workers_that_have_the_steps_cores_are_found_though_nobody_waits_for_a_batch():
    loop = Loop(observed(line(COMPUTING, 1.0), cores=CORES, workers=[["/home/me/train.py", 9, 3.0]]))
    (found,) = busy_cores(loop)
    assert "2 workers use 1.4 of 2 cores" in found.evidence and found.gain_share == pytest.approx(0.4)
    assert not list(busy_cores(Loop(observed(line(COMPUTING, 1.0), cores=CORES | {"waited": 0.02}))))
    strangers = CORES | {"workers": [0.02], "others": 1.4}
    assert not list(busy_cores(Loop(observed(line(COMPUTING, 1.0), cores=strangers))))


def test_threads_of_workers_above_the_cores_are_the_cause_of_waiting():
    lines = line(LOADING, 0.6), line(BACKWARD, 0.4)
    names = [
        found.finding for found in ranked(loop_findings(Loop(observed(*lines, cores=CORES, worker_threads=8)), 0.05))
    ]
    assert names == ["workers on the step's cores"]
    names = [found.finding for found in loop_findings(Loop(observed(*lines, cores=CORES, worker_threads=1)), 0.05)]
    assert names == ["waiting for the loader"]


def test_what_is_opened_for_each_sample_is_to_be_kept(tmp_path):
    (file := tmp_path / "data.py").write_text("def get(i):\n    return np.load('all.npz')[i]\n")
    opened = LineTime(str(file), 2, "get", DATASET, 0.5, 0)
    (found,) = loop_findings(Loop(observed(opened, line(BACKWARD, 0.5))), 0.05)
    assert "np.load" in found.where and "keep it" in found.advice


def test_a_weight_that_is_formed_in_each_forward_is_no_recomputed_activation():
    lines = line(RECOMPUTING, 0.45, 7, "weight"), line(COMPUTING, 0.15, 7, "weight"), line(RECOMPUTING, 0.1, 9)
    loop = Loop(observed(*lines, line(BACKWARD, 0.3)), forming={"train.py:7": 12.0})
    formed, *others = ranked(loop_findings(loop, 0.05))
    assert formed.finding == "weights formed anew" and formed.gain_share == pytest.approx(0.6) and not others
    assert "12 weights a step" in formed.evidence and formed.where.startswith("train.py:7")
    assert "60% of the time, 75% of that where checkpoints repeat" in formed.evidence
    (checkpoints,) = loop_findings(Loop(loop.observation), 0.05)
    assert checkpoints.finding == "recomputed activations" and checkpoints.gain_share == pytest.approx(0.55)


class Quantized(nn.Module):
    def __init__(self):
        super().__init__()
        self.ids, self.scale = torch.ones(96, 64, dtype=torch.int8), torch.ones(96, 1)

    def weight(self):
        blocks = [part.float() * scale for part, scale in zip(self.ids.split(16), self.scale.split(16), strict=True)]
        return torch.cat(blocks)

    def forward(self, x):
        return nn.functional.linear(x, self.weight())


def formed(forward):
    with profile(record_shapes=True, with_stack=True) as prof:
        forward()
    return [*forming_lines(read_trace(prof))]


def test_ops_that_form_a_weight_are_told_from_those_that_form_a_layers_input():
    layer, plain, x = Quantized(), nn.Linear(64, 96), torch.randn(8, 64)
    assert "test_wall.py in weight" in formed(lambda: layer(x))
    assert formed(lambda: plain(x * 2 + x)) == []
    normed = torch.nn.utils.parametrizations.spectral_norm(nn.Linear(64, 96))
    assert formed(lambda: normed(x)) == []
    with torch.autocast("cpu", torch.bfloat16):
        assert formed(lambda: plain(x.float())) == []


def test_new_tensors_that_deterministic_mode_fills_are_found():
    def step(inside):
        with made.step(), made.inside("cpu_op", inside):
            made.op("aten::fill_", [[1000]])

    made = Synthetic()
    step("aten::empty")
    (found,) = filled_tensors(Scene(parse(made.events)))
    assert found.finding == "deterministic algorithms" and "fill_uninitialized_memory" in found.advice
    made = Synthetic()
    step("aten::ones")
    assert not list(filled_tensors(Scene(parse(made.events))))


def test_the_page_shows_each_kind_each_iteration_and_the_source_around_a_finding(tmp_path):
    (file := tmp_path / "train.py").write_text("".join(f"line {number} < 3\n" for number in range(1, 9)))
    loop = Loop(observed(line(COMPUTING, 2.4), wall=wall(iterations(*[0.01] * 39, 1.0, *[0.01] * 39, 1.0))))
    found = replace(LAUNCHES, where="train.py:4 in step")
    shown = replace(_with_wall(diagnosis(findings=(found,)), loop, []), files={"train.py": str(file)})
    made = Synthetic()
    with made.step():
        made.op("aten::mm", kernel="kernel", us=50.0)
    html = page(shown, parse(made.events))
    assert "<mark>    4  line 4 &lt; 3</mark>" in html and "    7  line 7" in html and "line 8" not in html
    assert html.count("h0") == 80, "a point for each iteration"
    assert "no finding 71%" in html and "ordinary steps" in html and "1,000 ms" in html


RARELY = """
def main():
    for step in range(9):
        train(step)
        if step % 100 == 0:
            report()
def report():
    rest()
    figures()
def figures():
    for name in 'abc':
        table(name)
def table(name):
    pass
"""


def test_what_is_rare_is_named_by_the_innermost_line_that_runs_once(tmp_path):
    (file := tmp_path / "train.py").write_text(RARELY)
    exec(compile(RARELY, str(file), "exec"), made := {})
    main, report, figures, table = (made[name].__code__ for name in ("main", "report", "figures", "table"))
    spent = {(COMPUTING, ((table, 14), (figures, 12), (report, 9), (main, 6))): 2.0}
    steps = {(COMPUTING, ((main, 4),)): 0.4}
    held = iterations(*[0.01] * 39, 1.0, *[0.01] * 39, 1.0)

    def named(ran=()):
        rows = wall_time(held, held.kinds({}), {SLOW: spent, ORDINARY: steps}, ran)["kinds"]
        return next(row["line"][1:] for row in rows if row["kind"] == SLOW)

    assert named() == [9, "report"], "its loop is repeated, and the call of `report` only passes it on"
    assert named(ran={(report, 8), (report, 9), (main, 6)}) == [12, "figures"], "what each iteration runs isn't rare"


def test_what_steps_train_on_is_another_phase_and_no_finding(tmp_path):
    source = "for _ in range(9):\n    games = play()\n    learn(games)\n"
    (file := tmp_path / "train.py").write_text(source)
    code = compile(source, str(file), "exec")
    stacks = {SLOW: {(COMPUTING, ((code, 2),)): 2.0}, ORDINARY: {(COMPUTING, ((code, 3),)): 0.8}}
    loop = Loop(observed(line(COMPUTING, 2.8), wall=wall(iterations(*[0.01] * 39, 1.0, *[0.01] * 39, 1.0), stacks)))
    assert not list(slow_iterations(loop)) and loop.kinds[1].name == PHASE
    told = _with_wall(diagnosis(), loop, [])
    assert told.verdict.startswith("71% of the wall time is another phase (train.py:2)")
    assert "wasn't seen" not in told.verdict and f"  {PHASE}" in str(told)


def test_an_evaluation_between_epochs_is_named_by_its_call_and_not_by_what_it_repeats(tmp_path):
    (file := tmp_path / "train.py").write_text(RARELY)
    exec(compile(RARELY, str(file), "exec"), made := {})
    main, report, figures = (made[name].__code__ for name in ("main", "report", "figures"))
    stacks = {
        EPOCHS: {(EVALUATING, ((figures, 12), (report, 9), (main, 6))): 2.0},
        ORDINARY: {(COMPUTING, ((main, 4),)): 0.8},
    }
    held = iterations(*[0.01] * 39, 1.0, *[0.01] * 39, 1.0, marks={39: BEGAN, 79: BEGAN})
    lines = LineTime(str(file), 12, "figures", EVALUATING, 2.0, 0), line(COMPUTING, 0.8)
    (found,) = (f for f in loop_findings(Loop(observed(*lines, wall=wall(held, stacks))), 0.05))
    assert found.finding == "evaluation" and found.where == "train.py:9  figures()"


def test_what_a_dataset_does_in_many_lines_is_named_by_the_one_that_most_passes_through(tmp_path):
    (file := tmp_path / "data.py").write_text("one\ntwo\nsample = one(two(text))\n")
    sample, one, two = (compile(file.read_text(), str(file), mode) for mode in ("exec", "exec", "exec"))
    one, two = one.replace(co_name="one"), two.replace(co_name="two")
    spread = {(DATASET, ((code, n), (sample, 3), (train.__code__, 1))): 1.0 for n, code in ((1, one), (2, two))}
    assert innermost(spread, DATASET, {train.__code__}) == (str(file), 3)
    assert innermost(spread | {(DATASET, ((one, 1), (sample, 3))): 3.0}, DATASET, ()) == (str(file), 1)
    in_one = {(DATASET, ((one, number), (sample, 3))): float(number) for number in (1, 2)}
    assert innermost(in_one, DATASET, ()) == (str(file), 2)  # the function's most expensive line

    def named(first_s):
        lines = (LineTime(str(file), n, "sample", DATASET, s, 0) for n, s in ((1, first_s), (2, 0.3), (3, 0.3)))
        (found,) = loop_findings(Loop(observed(*lines, line(COMPUTING, 1.0), loads=(str(file), 3))), 0.05)
        return found.where

    assert named(0.2) == "data.py:3  sample = one(two(text))" and named(0.7) == "data.py:1  one"
