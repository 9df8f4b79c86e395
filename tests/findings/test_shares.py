"""What shares and milliseconds are of: a loop, a step, the time that other programs left; and who gets idle time."""

import json
from dataclasses import replace
from types import SimpleNamespace
from unittest.mock import patch

import pytest
from findings.made_up import LAUNCHES, diagnosis
from findings.synthetic import HOST, STREAM, Synthetic, parse

from helpers.findings import account
from helpers.findings.caveats import _silent, _start_up, loop_warnings, own_clock
from helpers.findings.diagnose import _of_slowest, _with_observed
from helpers.findings.loop import Loop
from helpers.findings.rules.unrecorded import FAULT_S, PAGE, growing_memory, loop_findings
from helpers.findings.rules.wall import late_rank
from helpers.findings.scene import Scene
from helpers.lab.memory import MIB
from helpers.script.iterations import NO_CORE, ORDINARY, SLOW
from helpers.script.observation import LineTime, Observation
from helpers.script.stacks import BACKWARD, COMPUTING, DATASET, LOADING, OPTIMIZER

FILE = "/home/me/train.py"


def line(activity, seconds, number=1, file=FILE):
    return LineTime(file, number, "train", activity, seconds, 0)


def observed(*lines, **others):
    seconds = sum(each.seconds for each in lines)
    return Observation(seconds=seconds, iterations=[seconds / 10] * 10, lines=list(lines), epochs=1, **others)


def kind(name, seconds, count=10):
    return {"kind": name, "seconds": seconds, "count": count, "took_s": seconds / count, "spent": []}


def test_a_step_and_its_shares_are_of_the_time_that_other_programs_left():
    cores = {"cores": 2, "workers": [0.3], "children": 0.2, "others": 1.5}  # three quarters of what it lacks
    wall = {"seconds": 10.0, "kinds": [kind(ORDINARY, 8.0), kind(NO_CORE, 2.0)]}
    loop = Loop(observed(line(COMPUTING, 10.0), cores=cores, wall=wall))
    assert loop.strangers == pytest.approx(0.75)
    assert (loop.others_s, loop.wall_s) == pytest.approx((1.5, 8.5))
    assert loop.step_ms == pytest.approx(1000 * (1 - 1.5 / 10))
    assert {each.name: each.share for each in loop.kinds} == pytest.approx({ORDINARY: 8 / 8.5, NO_CORE: 0.5 / 8.5})


def test_a_findings_milliseconds_are_its_share_of_a_step_and_its_line_the_dearest():
    loop = Loop(observed(line(LOADING, 0.5, 3), line(LOADING, 1.5, 7), line(BACKWARD, 2.0)))
    (found,) = loop_findings(loop, 0.05)
    assert (found.gain_share, found.gain_ms) == pytest.approx((0.5, 200.0))
    assert found.where.startswith("train.py:7")


def test_what_is_waited_for_and_what_the_datasets_lines_take_count_together():
    lines = line(LOADING, 0.3), line(DATASET, 0.2, 5), line(BACKWARD, 0.5)
    cores = {"cores": 2, "main": 0.9, "waited": 0.0, "workers": [0.1], "children": 0.0, "others": 0.0}
    for threads, name in ((1, "waiting for the loader"), (8, "workers on the step's cores")):
        findings = loop_findings(Loop(observed(*lines, cores=cores, worker_threads=threads)), 0.05)
        assert {found.finding: found.gain_share for found in findings}[name] == pytest.approx(0.5)


def test_what_is_counted_is_over_all_iterations_of_which_the_last_alone_have_times():
    often = observed(line(BACKWARD, 1.0), averaged=400, count=100)
    (found,) = loop_findings(Loop(often), 0.05)
    assert found.finding == "gradients averaged too often" and found.evidence.startswith("4 times an iteration")
    assert not loop_findings(Loop(replace(often, count=400)), 0.05)


def test_growing_memory_costs_its_pages_and_a_list_of_numbers_is_not_what_fills_it():
    memory = [(number, number * 100 * MIB, 0) for number in range(10)]
    lists = [[FILE, 3, 10, False, 50 * MIB, False], [FILE, 4, 10, False, MIB, False]]
    loop = Loop(observed(line(BACKWARD, 1.0), memory=memory, growing=lists, available=1000 * MIB))
    (found,) = growing_memory(loop)
    assert found.where.startswith("train.py:3") and "full after 10 more" in found.evidence
    assert found.gain_ms == pytest.approx(100 * MIB / PAGE * FAULT_S * 1e3)
    assert found.urgent, "a second is left"
    plenty = replace(loop.observation, available=10**6 * 100 * MIB)
    (warning,) = loop_warnings(Loop(plenty))
    assert warning.kind == "growing memory" and "(train.py:3" in warning.text


def test_what_a_profile_shows_of_updates_is_at_most_what_they_took_in_the_loop():
    update = replace(LAUNCHES, finding="unfused optimizer", part=account.UPDATING, gain_share=0.5)
    other = replace(update, finding="small batches", part=account.OPERATORS)
    loop = Loop(observed(line(BACKWARD, 0.8), line(OPTIMIZER, 0.2)))
    _, found = _with_observed(diagnosis(account=None, idle={}, host={}), [update, other], loop, 0.05)
    shares = {each.finding: (each.gain_share, each.gain_ms) for each in found}
    assert shares["unfused optimizer"] == pytest.approx((0.2, 20.0))
    assert shares["small batches"] == pytest.approx((0.5, 50.0))


def test_what_a_slow_iteration_shows_is_a_share_of_what_such_iterations_take(tmp_path):
    gpu = Synthetic()
    for number in range(4):
        with gpu.step():
            gpu.train_step(number)
            with gpu.inside("user_annotation", "enumerate(DataLoader)#_SingleProcessDataLoaderIter.__next__"):
                gpu.now = gpu.free + 5000
    (file := tmp_path / "slowest.json").write_text(json.dumps({"traceEvents": gpu.events}))
    wall = {"seconds": 10.0, "kinds": [kind(ORDINARY, 6.0), kind(SLOW, 4.0, count=2)]}
    loop = Loop(observed(line(COMPUTING, 10.0), wall=wall))
    (found,) = _of_slowest(file, loop, 0.05)
    assert found.finding == "waiting for the loader" and 0.3 < found.gain_share < 0.4
    assert found.gain_ms == pytest.approx(found.gain_share * 1000) and found.kinds == {SLOW: found.gain_share}


def test_the_rank_whose_own_work_takes_longest_is_late_by_what_the_others_lack():
    def rank(own, seconds=1.0):
        lines = [line(COMPUTING, own), line(LOADING, 0.1, 2), line(BACKWARD, 0.9 - own)]
        return Observation(seconds=seconds, iterations=[0.1] * 10, lines=lines)

    last, (found,) = late_rank({0: rank(0.2), 1: rank(0.2), 2: rank(0.5)})
    assert last == 2 and found.gain_share == pytest.approx(0.3) and found.where.startswith("train.py:1")
    assert "rank 2 is late" in found.evidence
    assert late_rank({0: rank(0.2), 1: rank(0.2)}) == late_rank({0: rank(0.2)}) == (-1, [])
    assert late_rank({0: rank(0.2, 0.1), 1: rank(0.5, 0.1)}) == (-1, [])  # a few looks


@pytest.mark.parametrize(("us", "shown"), [(2_000.0, []), (100_000.0, ["(10% of the time)"])])
def test_start_up_on_a_cpu_is_a_share_of_the_recorded_time(us, shown):
    made = Synthetic()
    with made.step():
        made.write("cpu_op", "aten::mm", made.now, made.now + 1e6 - 1, HOST)
        made.write("cuda_runtime", "cudaFree", made.now, made.now + us, HOST)
        made.now += 1e6 - 1
    texts = list(_start_up(Scene(parse(made.events))))
    assert [text for text, share in zip(texts, shown, strict=True) if share in text] == texts


def test_a_gap_of_the_devices_own_is_no_wait_of_the_hosts_but_a_long_one_is():
    """Two kernels are queued, then the host waits for both."""
    for gap, reason in ((5.0, account.QUEUED), (500.0, account.IN_WAIT)):
        made = Synthetic()
        for number, begin in enumerate((1020.0, 1120.0 + gap)):
            made.write("kernel", "gemm", begin, begin + 100, STREAM, correlation=number + 1)
            made.call("cudaLaunchKernel", 4.0, correlation=number + 1)
        made.call("cudaStreamSynchronize", 1000.0)
        idle = account.device_account(parse(made.events)).idle
        assert {name: account.length(spans) for name, spans in idle.items() if spans} == {reason: gap}


def test_a_clock_that_began_with_the_first_iteration_reads_as_its_last_span_does():
    spans = [[1.0, 0.0, 10, False, False, False], [3.0, 1.0, 10, True, False, False]]
    seen = Observation(clock=[[[FILE, 3], [FILE, 9], spans]])
    (note,) = own_clock(seen, 100.0)
    assert "reads 200 ms an iteration, a step takes 100 ms" in note.text
    usual = Observation(clock=[[[FILE, 3], [FILE, 9], [*spans[:1] * 2, [9.0, 0.0, 10, False, False, False]]]])
    assert "reads 100 ms an iteration" in next(own_clock(usual, 100.0)).text
    assert len(list(own_clock(Observation(clock=[*seen.clock, [[FILE, 4], [FILE, 8], spans]]), 100.0))) == 1


@pytest.mark.parametrize("reason", [account.QUEUED, account.IN_WAIT])
def test_a_device_that_idles_with_work_queued_or_waited_for_is_told_with_its_share(reason):
    calls = [SimpleNamespace(kind="runtime", name="cudaStreamSynchronize", begin=0.0, end=900.0)]
    idle = SimpleNamespace(idle_shares={reason: 0.3}, idle={account.IN_WAIT: [(0.0, 900.0)]})
    scene = SimpleNamespace(account=idle, trace=SimpleNamespace(host=calls), per_step=lambda us: us)
    with patch("helpers.findings.caveats.source_lines", lambda *_: "train.py:3"):
        (text,) = _silent(scene)
    assert "30% of the time" in text
    idle.idle_shares[reason] = 0.001
    assert list(_silent(scene)) == []


def test_padding_is_told_with_the_rate_that_leaves_it_out():
    seen = Observation(clock=[[[FILE, 3], [FILE, 9], [[1.0, 0.0, 10, False, False, False]]]])
    (note,) = own_clock(replace(seen, padding=[1000, 600, 0]), 100.0)
    assert "60% of the positions are padding" in note.text and "2.5× that of tokens" in note.text
    assert "padding" not in next(own_clock(replace(seen, padding=[1000, 100, 0]), 100.0)).text
