"""Programs that take turns: their ratio, what becomes of those that fail, and that none is left."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from helpers.lab.trials import FASTER, Program, programs, trees, trial

HERE = Path(__file__).parent
ANY_LOAD = 1e9  # tests run beside others


def program(function: str, name: str = "", **arguments) -> Program:
    return Program(name or function, function=f"programs_to_try:{function}", arguments=arguments, folder=str(HERE))


OURS = "TRIALS_OF_THIS_TEST"


def marked() -> list[int]:
    """The living processes of this test's trials."""
    wanted = f"{OURS}={os.getpid()}\0".encode()
    environments = {int(f.parent.name): _read(f) for f in Path("/proc").glob("[0-9]*/environ")}
    return [pid for pid, text in environments.items() if f"{trees.MARK}=".encode() in text and wanted in text + b"\0"]


def _read(file: Path) -> bytes:
    try:
        return file.read_bytes()
    except OSError:
        return b""


@pytest.fixture(autouse=True)
def _nothing_is_left(monkeypatch):
    monkeypatch.setenv(OURS, str(os.getpid()))
    yield
    assert not marked()


def test_half_the_time_is_faster_and_has_an_interval():
    result = trial(program("sleep", "slow", ms=20), program("sleep", "fast", ms=10), seconds=4, loaded=ANY_LOAD)
    assert result.estimate.verdict == FASTER
    assert result.estimate.low < 0.55 and 0.45 < result.estimate.high < 1
    row = result.row()
    assert {"ratio", "low", "high", "pairs", "starts", "verdict", "median_ms", "baseline_ms"} <= set(row)
    assert row["baseline"] == "slow" and row["baseline_ms"] > row["median_ms"] >= 10


def test_a_worker_makes_nothing_ahead_while_the_other_has_the_turn():
    result = trial(program("prefetch", "loader", ms=20), program("sleep", ms=100), seconds=3, loaded=ANY_LOAD)
    assert result.baseline_ms > 15  # else its queue was full of what the worker had made meanwhile


@pytest.mark.parametrize(
    ("bad", "reason"),
    [
        (program("die", after=3), "die ended with code 1: no more steps"),
        (program("kill", after=3), "kill was killed, as when memory runs out"),
        (program("sleep", "hang", ms=60_000), "hang hangs: no turn ended within 1 s"),
        (program("nothing"), "nothing ended with code 1: AttributeError"),
        (Program("absent", command=["/no/such/program"]), "absent does not start"),
    ],
    ids=lambda value: getattr(value, "name", ""),
)
def test_a_program_that_fails_is_a_row_with_its_reason(bad, reason):
    result = trial(program("sleep", ms=1), bad, seconds=2, silence_s=1, loaded=ANY_LOAD)
    assert result.estimate is None
    assert result.reason.startswith(reason)
    assert result.row() == {"status": result.reason}


def test_pairs_beside_others_work_are_dropped_and_counted(monkeypatch):
    class Loaded:
        cores = 1.5

        def __enter__(self):
            return self

        def __exit__(self, *_):
            pass

    monkeypatch.setattr(programs, "OthersLoad", Loaded)
    result = trial(program("sleep", ms=1), program("sleep", "same", ms=1), seconds=0.5)
    assert result.estimate is None and result.dropped >= 1
    assert "beside others' work" in result.reason


def test_programs_that_do_not_fit_together_live_one_after_the_other(monkeypatch):
    monkeypatch.setattr(programs, "TOGETHER", 0)
    alive = []
    living = programs.living

    def counted(*arguments):
        alive.append(len(set(marked())))
        return living(*arguments)

    monkeypatch.setattr(programs, "living", counted)
    result = trial(program("sleep", ms=20), program("sleep", "fast", ms=10), seconds=4, loaded=ANY_LOAD)
    assert result.estimate.ratio < 0.8
    assert max(alive) == min(alive)  # never one beside another


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_whatever_ends_the_trial_no_process_is_left(number):
    code = (
        "from helpers.lab.trials import Program, trial\n"
        f"one = Program('one', function='programs_to_try:prefetch', arguments={{'ms': 5}}, folder={str(HERE)!r})\n"
        "print('begun', flush=True)\n"
        "trial(one, one, seconds=60, loaded=1e9)"
    )
    parent = subprocess.Popen(
        [sys.executable, "-c", code], cwd=HERE.parents[2], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
    )
    parent.stdout.readline()
    deadline = time.monotonic() + 20
    while len(marked()) < 3 and time.monotonic() < deadline:  # a program, its worker, and more
        time.sleep(0.02)
    assert marked()
    os.kill(parent.pid, number)
    parent.wait(timeout=20)
    while marked() and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not marked()
