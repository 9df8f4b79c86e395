"""Whether iterations get slower over minutes, at which line, and what grows: simulated times, and a watched script."""

from array import array

import numpy as np
import pytest
from script.recorded import watch

from helpers.findings.diagnose import diagnose
from helpers.findings.loop import Loop
from helpers.findings.rules.unrecorded import slower_and_slower
from helpers.script import windows
from helpers.script.iterations import BLOCKS, FILES, UNUSED, blocks, grown, later_line, trend
from helpers.script.observation import Observation
from helpers.script.recording import NothingRecorded

GROWS = """
import torch
torch.set_num_threads(1)
model = torch.nn.Linear(64, 64)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
losses = []
while True:
    optimizer.zero_grad()
    loss = model(torch.randn(8, 64)).square().mean()
    loss.backward()
    optimizer.step()
    losses.append(loss.detach())
    torch.stack(losses).mean()
"""


def simulated(growth, minutes, seed, noise=0.1, step_s=0.1):
    """The trend of iterations whose time grows by this share a minute and scatters."""
    random, began, took = np.random.default_rng(seed), 0.0, []
    while began < 60 * minutes:
        took.append(step_s * np.exp(growth * began / 60 + random.normal(0, noise)))
        began += took[-1]
    return trend(blocks(array("d", np.cumsum(took)), array("d", took)))


@pytest.mark.long
def test_the_interval_of_a_trend_holds_the_true_one():
    held = sum(t.low <= 0.05 <= t.high for t in (simulated(0.05, 4, seed) for seed in range(200)))
    assert held >= 190
    assert sum(t.low > 0 for t in (simulated(0.0, 4, seed) for seed in range(200))) <= 4
    assert sum(t.low > 0 for t in (simulated(0.02, 10, seed) for seed in range(50))) == 50


def test_a_trend_tells_the_times_at_both_ends_and_what_it_excludes():
    found = simulated(0.1, 5, 0, noise=0.01)
    assert found.first_ms == pytest.approx(100, rel=0.03)
    assert found.last_ms / found.first_ms == pytest.approx(np.exp(0.1 * found.minutes), rel=0.02)
    assert found.growth == pytest.approx(0.1, abs=0.01)
    assert simulated(0.0, 5, 1).most < 0.05


def test_too_few_iterations_have_no_trend():
    assert trend(blocks(array("d", [1.0, 2.0, 3.0]), array("d", [1.0, 1.0, 1.0]))) is None
    assert blocks(array("d"), array("d")) == []
    assert len(blocks(array("d", range(1, 100)), array("d", [1.0] * 99))) == BLOCKS


def look(iterations, lines=(), counted=(), **kept):
    return {"iterations": iterations, "lines": list(lines), "kept": kept, "counted": dict(counted)}


def test_what_there_is_more_of_at_each_look_grows():
    looks = [
        look(n, Tensor=100 + 2 * n, dict=50 + up, list=7, counted=[(FILES, 3 + n), (UNUSED, 0)])
        for n, up in ((16, 0), (24, 90), (36, 20))  # dictionaries come and go
    ]
    assert grown(looks) == [("Tensor", 2.0), (FILES, 1.0)]
    assert grown(looks[:2]) == []


def test_the_line_that_takes_longer_later_is_found_and_not_the_dearest():
    dear, slower = ("a.py", 1), ("a.py", 2)
    looks = [look(n, [[*dear, 5.0 * n], [*slower, 0.01 * n**2]]) for n in (16, 36, 81)]
    line, more = later_line(looks)
    assert line == slower and more == pytest.approx(0.01 * ((81 + 36) - (36 + 16)))
    assert later_line([look(n, [[*dear, 5.0 * n]]) for n in (16, 36, 80)]) is None


def slower(medians, looks):
    loop = Loop(Observation(iterations=[0.1] * 9, seconds=1.0, pace={"blocks": medians, "looks": looks}))
    return list(slower_and_slower(loop))


def test_a_clock_that_falls_is_the_cause_where_nothing_grows():
    medians = [[number / 4, 100 * 1.05**number] for number in range(BLOCKS)]
    looks = [look(n, counted=[("clock, MHz", clock), ("temperature, °C", 88)]) for n, clock in ((16, 1980), (81, 1410))]
    (finding,) = slower(medians, looks)
    assert "1,980 to 1,410 MHz at 88 °C" in finding.evidence and "cool the card" in finding.advice


def test_a_line_that_has_more_to_do_is_the_scripts_own_where_nothing_is_kept():
    medians = [[number / 4, 100 * 1.05**number] for number in range(BLOCKS)]
    for line, advice in (("a.py", "a running result"), ("", "look at other processes")):
        looks = [look(n, [[line, 1, 0.01 * n**2]] if line else []) for n in (16, 36, 81)]
        (finding,) = slower(medians, looks)
        assert advice in finding.advice


@pytest.mark.long
def test_a_script_that_gets_slower_is_told_with_its_line_and_what_it_keeps(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(windows, "OBSERVED_S", 0.5)
    (tmp_path / "train.py").write_text(GROWS)
    diagnosis = diagnose(watch("train.py", minutes=0.05).folder)
    found = {finding.finding: finding for finding in diagnosis.findings}["slower and slower"]
    assert "torch.stack(losses)" in found.where and "Tensor" in found.evidence and found.gain_share > 0.1


def test_ranks_are_not_watched_for_minutes(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("WORLD_SIZE", "2")
    (tmp_path / "train.py").write_text(GROWS)
    with pytest.raises(NothingRecorded, match="for one process"):
        watch("train.py", minutes=1)
