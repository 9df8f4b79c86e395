import time

import pytest
import torch

from helpers.lab import Disagreement, bench, ceilings, compare, phases, timing
from helpers.lab.timing import Timing, check_agreement, relative_error


def sleeping(milliseconds):
    return lambda: time.sleep(milliseconds / 1e3)


def test_bench_times_what_it_runs():
    timing = bench(sleeping(2), repeat=20, seconds=0)
    assert timing.median_ms > 1.9
    assert timing.n == 20
    assert timing.p20_ms <= timing.median_ms <= timing.p80_ms


def test_bench_repeats_a_short_run_until_the_time_is_filled():
    assert 20 < bench(lambda: None, seconds=0.05).n <= 1000
    assert 5 <= bench(sleeping(2), repeat=5, seconds=0.05).n <= 25


def test_phases_are_timed_apart_and_what_follows_the_last_is_not():
    def step():
        time.sleep(0.001)
        yield "short"
        time.sleep(0.004)
        yield "long"
        time.sleep(0.02)

    times = phases(step, repeat=5, warmup=1, seconds=0)
    assert list(times) == ["short", "long"]
    assert 0.9 < times["short"].median_ms < times["long"].median_ms
    assert 3.9 < times["long"].median_ms < 19  # what follows it takes 20


def test_variants_take_turns_to_and_fro():
    order = []

    def variant(name):
        return lambda: (order.append(name), time.sleep(0.06))

    compare({name: variant(name) for name in "abc"}, rounds=3, warmup=1, check=False)
    assert "".join(order) == "abc" + "abccbaabc"


def test_a_turn_of_short_calls_has_many():
    calls = []
    result = compare({"short": lambda: calls.append(1)}, rounds=2, warmup=1, check=False)
    assert len(calls) > 8
    assert result.timing("short").n == 2
    assert len(result.calls_ms["short"]) == len(calls) - 1 - 2  # neither the one before nor the first of a turn


def test_what_runs_before_is_not_timed():
    result = compare({"a": sleeping(1)}, rounds=5, warmup=1, check=False, before=sleeping(50))
    assert result.timing("a").median_ms < 50


def test_what_runs_before_also_runs_before_the_check():
    state = torch.ones(1)
    ways = {name: lambda: state.mul_(2).clone() for name in "ab"}
    compare(ways, rounds=1, warmup=1, before=lambda: state.fill_(1))
    with pytest.raises(Disagreement):
        compare(ways, rounds=1, warmup=1)


def test_a_gpu_is_kept_waiting_and_a_cpu_is_not(monkeypatch):
    waits = []
    monkeypatch.setattr(torch.cuda, "_sleep", waits.append)
    monkeypatch.setattr(timing, "device", lambda: torch.device("cpu"))
    timing.queue_ahead()
    assert waits == []
    monkeypatch.setattr(timing, "device", lambda: torch.device("cuda"))
    timing.queue_ahead()
    timing.queue_ahead(7)
    assert waits == [2_000_000, 7]


def test_the_ratio_of_turns_has_an_interval_and_a_verdict():
    result = compare({"fast": sleeping(1), "slow": sleeping(20)}, rounds=8, warmup=1, check=False)
    assert result.table(to="slow")["verdict"].tolist() == ["faster", "baseline"]
    table = result.table()
    assert table["verdict"].tolist() == ["baseline", "slower"]
    assert 1 < table["low"][1] <= table["ratio"][1] <= table["high"][1]
    assert table["pairs"][1] == 8


def test_a_way_that_computes_something_else_is_named_and_not_timed():
    x = torch.randn(10)
    with pytest.raises(Disagreement, match="'wrong' differs from 'right'"):
        compare({"right": lambda: x, "wrong": lambda: x + 0.01})


def test_nan_never_agrees():
    x = torch.randn(10)
    with pytest.raises(Disagreement):
        check_agreement({"right": lambda: x, "wrong": lambda: x * float("nan")}, tolerance=1e9)


@pytest.mark.parametrize("reals", [{"value"}, {"reference"}, set()])
def test_what_is_complex_on_one_side_alone_is_compared_whole(reals):
    numbers = {name: torch.tensor([1.0] if name in reals else [1.0 + 1.0j]) for name in ("value", "reference")}
    apart = {"value": 2**-0.5, "reference": 1.0}  # by the norm of the reference
    assert relative_error(**numbers) == pytest.approx(sum(apart[name] for name in reals))


def test_equal_infinities_agree_and_others_do_not():
    mask = torch.tensor([3.0, -torch.inf, 4.0, torch.inf])
    assert relative_error(mask, mask) == 0
    assert relative_error(mask + torch.tensor([0, 0, 0.5, 0]), mask) == pytest.approx(0.1)
    for wrong in (torch.tensor([3.0, torch.inf, 4.0, torch.inf]), torch.tensor([3.0, 0.0, 4.0, torch.inf])):
        for pair in ((wrong, mask), (mask, wrong)):
            assert not relative_error(*pair) < 1e9


def test_dicts_agree_key_by_key():
    x, y = torch.randn(3), torch.randn(3)
    check_agreement({"a": lambda: {"x": x, "y": [y]}, "b": lambda: {"y": (y,), "x": x}})
    with pytest.raises(Disagreement, match=r"'b' differs from 'a' by .* of its norm at 'x'"):
        check_agreement({"a": lambda: {"x": x, "y": y}, "b": lambda: {"x": y, "y": x}})
    with pytest.raises(Disagreement, match=r"'b' returns shapes 'z' \(3,\), the reference 'a' shapes 'x' \(3,\)"):
        check_agreement({"a": lambda: {"x": x}, "b": lambda: {"z": x}})


@pytest.mark.parametrize("call", [lambda: bench(lambda: None, repeat=0), lambda: compare({"a": torch.rand}, rounds=0)])
def test_nothing_cannot_be_timed(call):
    with pytest.raises(ValueError, match="is 0; it must be an integer of at least 1"):
        call()


@pytest.mark.parametrize("check", [True, False])
def test_nothing_cannot_be_compared(check):
    with pytest.raises(ValueError, match="there are no variants to compare"):
        compare({}, check=check)


def test_a_way_without_a_tensor_cannot_be_checked():
    with pytest.raises(Disagreement, match="returns no tensor"):
        compare({"a": lambda: 1.0, "b": lambda: 1.0})


def test_the_error_is_relative_to_the_reference():
    assert relative_error(torch.tensor([3.0, 4.4]), torch.tensor([3.0, 4.0])) == pytest.approx(0.4 / 5)
    assert relative_error(torch.tensor([0.5]), torch.tensor([0.0])) == 0.5
    assert relative_error(torch.tensor([1 - 1j]), torch.tensor([1 + 1j])) == pytest.approx(2**0.5)


def test_the_time_of_a_launch_is_that_of_many_over_their_number(monkeypatch):
    monkeypatch.setattr(ceilings, "bench", lambda queue: queue() or Timing(20.0, 10.0, 40.0, 5, None))
    one = ceilings.launch(10)
    assert (one.median_ms, one.p20_ms, one.p80_ms, one.n) == (2.0, 1.0, 4.0, 5)
