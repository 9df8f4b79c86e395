"""Where a search's seconds go: the length of a turn, what a trial may still bring, and what is kept for the total."""

import json
import math
import os
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from helpers.lab.estimate import FASTER, PRECISION, estimate
from helpers.lab.memory import GIB
from helpers.lab.trials import turns
from helpers.trying import child, search
from helpers.trying.answer import Result, Tried, text
from helpers.trying.changes import ALL
from helpers.trying.same_training import BLOCKS, course
from helpers.trying.sides import LONG_S, PAIRS, TURN_S, TURN_STEPS, Side, Sides, Trial

PLAIN = Side(["train.py"])


class Steps:
    """A process whose turns take what is listed, a step each, again and again."""

    def __init__(self, *seconds):
        self.seconds, self.turns = seconds, []

    def take(self, turn):
        self.turns.append(turn)
        return self.seconds[(len(self.turns) - 2) % len(self.seconds)]


def fitted(*seconds, turns=0.0):
    sides, process = Sides("train.py", [], False, ""), Steps(*seconds)
    return sides, sides.fit_turn(process, turns), process


@pytest.mark.parametrize(
    ("step_s", "steps"), [(0.001, 250), (0.02, 13), (0.1, TURN_STEPS), (0.2, 2), (0.5, 1), (3.0, 1)]
)
def test_a_turn_is_some_steps_and_a_quarter_of_a_second_but_of_long_steps_half_a_second(step_s, steps):
    sides, measured, process = fitted(step_s)
    assert measured == step_s and sides.turn["steps"] == steps and len(process.turns) == 4
    assert (steps == 1 or steps * step_s <= max(LONG_S, TURN_S)) and sides.turn["drop"] == (steps > 1)
    assert sides.turn_s == pytest.approx(max(TURN_S, (steps + (steps > 1)) * step_s))
    assert sides.pairs_s == pytest.approx(2 * PAIRS * sides.turn_s) and sides.least_s == sides.pairs_s


def test_turns_that_are_unlike_leave_nothing_out_and_pairs_are_as_many_as_four_stretches_hold(monkeypatch):
    clock = iter(range(10**6))
    monkeypatch.setattr("helpers.trying.sides.time.monotonic", lambda: float(next(clock)))
    sides, *_ = fitted(0.1, 0.1, 0.1, 0.1, 0.1, 0.1, 3.0, turns=100.0)
    assert sides.turn["drop"] == 0 and sides.pairs == 4 * 7


def trial(**values):
    return Trial(PLAIN, Side(["train.py"], ["attention"]), **values)


def test_another_start_is_worth_half_of_what_one_took_and_the_first_as_much_as_patience_says():
    sides = SimpleNamespace(start_s=4.0, least_s=6.0)
    assert trial(patience=3.0).least_s(sides) == 18.0
    assert trial(starts=[[0.0]] * 2, seconds=40.0).least_s(sides) == (4 + 20) / 2
    assert trial(starts=[[0.0]] * 2, seconds=10.0).least_s(sides) == 6.0


def test_what_a_trial_may_bring_is_what_its_interval_leaves():
    tried = trial(promise=0.1, starts=[list(np.log([0.7, 0.75, 0.8, 0.85, 0.75, 0.8]))])
    assert trial(promise=0.1).hope == 0.1
    assert tried.hope == 1 - tried.estimate.low > 0.2


@pytest.mark.parametrize("narrow", [False, True])
def test_a_start_ends_when_more_pairs_tell_nothing_beside_what_it_adds_or_beside_the_effect(narrow):
    one = trial(narrow=narrow)
    for ratio, scatter in ((0.5, 0.1), (0.5, 0.4), (1.0, 0.02), (1.0, 0.2), (1.5, 0.2), (0.9, 0.05)):
        alone = estimate([np.log(ratio) + scatter * np.linspace(-1, 1, 12)], luck=0.0)
        known_to = max(PRECISION, one.start_noise, abs(alone.ratio - 1) / (10 if narrow else 2)) / 2
        precise = alone.low > 1.2 or (alone.high - alone.low) / 2 / max(alone.ratio, 1) <= known_to
        assert one._precise(alone) == precise, (ratio, scatter)


def promises(name, applying, *findings, parts=None):
    found = [SimpleNamespace(finding=finding, gain_share=share, where="") for finding, share in findings]
    one = SimpleNamespace(result=Result("train.py", findings=found), parts=parts or {})
    return search._promise(one, name, applying)


def test_a_finding_promises_its_share_and_a_probe_half_of_it_where_a_change_applies():
    waiting = "waiting for the loader", 0.6
    alone = promises("same-batch", ["same-batch"], waiting, parts={"operators": 1.0})
    beside = promises("same-batch", ["same-batch", "loader-workers"], waiting, parts={"operators": 1.0})
    assert alone[0] == pytest.approx(0.6 / ALL["same-batch"].patience) and beside[0] == pytest.approx(alone[0] / 2)
    assert alone[1] == beside[1] == 0.6


def test_what_no_finding_asks_for_promises_its_share_of_its_parts_but_for_what_lies_outside_of_steps():
    change = ALL["compile"]
    parts = dict.fromkeys(change.parts, 0.5 / len(change.parts)) | {"nobody's": 0.5}
    promise, most = promises("compile", ["compile"], ("evaluation", 0.2), parts=parts)
    assert most == pytest.approx(0.5 * (1 - 0.2)) and promise == pytest.approx(change.share * most / change.patience)


@pytest.mark.parametrize(("helped", "left", "goes_on"), [(1, 11.0, True), (2, 11.0, False), (2, 17.0, True)])
def test_the_seconds_of_a_total_are_kept_for_it_where_there_will_be_one(helped, left, goes_on):
    known = trial(starts=[[-0.3, 0.1, -0.2, 0.2]], seconds=16.0)
    rows = [Tried(f"change {number}", "change", 0.2, 0.1, 0.3, FASTER) for number in range(helped)]
    one = SimpleNamespace(result=Result("train.py", tried=rows), left=left, start_s=4.0, least_s=6.0)
    assert (search._next(one, [known]) is known) == goes_on


def test_what_was_observed_is_in_milliseconds_and_gib(tmp_path):
    report = Path(tmp_path, "report")
    report.write_text(json.dumps({"facts": {"device": "cpu"}, "peak": 3 * GIB, "losses": [1.0] * 60}))

    @contextmanager
    def running(*sides, silence_s):
        yield [(None, report) for _ in sides]

    result = Result("train.py")
    one = SimpleNamespace(command=["train.py"], seconds=60.0, kept={"A": "1"}, result=result, running=running)
    one.fit_turn, one.tell = lambda process, seconds: 0.02 * seconds, lambda text: None
    search._observe(one)
    assert result.step_ms == pytest.approx(1e3 * 0.02 * 60 / 16)
    assert (result.peak_gib, result.pages_kept, one.facts) == (3.0, True, {"device": "cpu"})
    assert len(one.twin.losses) == 60


def test_the_twin_runs_until_its_losses_can_be_compared(tmp_path):
    reports = [Path(tmp_path, name) for name in ("base", "twin")]
    losses = [[1.0] * 60, []]

    def write(report, losses):
        report.write_text(json.dumps({"facts": {"device": "cpu"}, "peak": 0, "losses": losses}))

    class Twin:
        def take(self, turn):
            losses[1] += [1.0] * 5
            write(reports[1], losses[1])

    @contextmanager
    def running(*sides, silence_s):
        yield [*zip((None, Twin()), reports, strict=True)]

    for report, lost in zip(reports, losses, strict=True):
        write(report, lost)
    one = SimpleNamespace(command=["train.py"], seconds=600.0, kept={}, result=Result("train.py"), running=running)
    one.fit_turn, one.tell, one.turn = lambda process, seconds: 0.02, lambda text: None, None
    search._observe(one)
    assert len(one.twin.losses) == search.LEAST_STEPS


def test_the_time_between_two_runs_of_a_script_and_its_first_iterations_do_not_count(monkeypatch):
    (reading, orders), (answers, writing) = os.pipe(), os.pipe()
    monkeypatch.setenv(turns.PIPES, f"{reading},{writing}")
    clock = SimpleNamespace(now=0.0)
    for module in (child, turns):
        monkeypatch.setattr(module, "time", SimpleNamespace(perf_counter=lambda: clock.now))
    os.write(orders, b'{"drop": 0, "seconds": 100.0, "steps": 3}\n{"drop": 0, "seconds": 0.0, "steps": 1}\n')
    steps = child.Steps()

    def step(*ends):
        for clock.now in ends:
            steps.step_done()

    step(1.0, 2.0)  # the first answers what was asked for before
    steps.run_ended()
    step(50.0, *(51.0 + number for number in range(child.SETTLING - 1)))
    step(clock.now + 4.0, clock.now + 8.0)
    with os.fdopen(answers) as lines:
        assert [json.loads(lines.readline()) for _ in range(2)] == [[1, 1.0], [3, 9.0]]


def test_a_search_has_its_seconds_and_the_scripts_whole_command():
    one = search.Search("train.py", ["--steps", 3], False, "", seconds=60.0, tell=print)
    assert 50 < one.left <= 60 and one.command == ["train.py", "--steps", "3"]


def test_nothing_helped_is_said_and_losses_that_nobody_saw_are_not():
    assert "what was tried and helped\n  nothing" in text(Result("train.py"))
    assert str(Tried("optimizer", "change", 0.2, 0.1, 0.3, FASTER)).endswith(
        "faster; 20% (10% to 30%) of the time goes"
    )
    edited = Result("train.py", tried=[Tried("edited.py", "edited", 0.2, 0.1, 0.3, FASTER)])
    assert "beside it\n  edited.py" in text(edited) and "tried and helped" not in text(edited)
    slower = Tried("optimizer", "change", -0.25, -0.3, -0.21, "slower")
    assert str(slower).endswith("slower; 125% (121% to 130%) of the time is taken")


def test_a_course_is_the_mean_of_a_tenth_of_the_losses_each():
    losses = [float(number) for number in range(40)]
    assert course(losses) == [1.5 + 4 * block for block in range(BLOCKS)]
    assert course([None, *losses[1:]])[0] == 2.0 and course([None] * 4 + losses[4:])[0] is None
    assert course(losses[:9]) == losses[:9] and math.isclose(course(losses[:10])[9], 9.0)
