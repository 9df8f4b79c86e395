"""Programs that take turns: their ratio, what becomes of those that fail, and that none is left."""

import contextlib
import multiprocessing
import os
import signal
import subprocess
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from helpers.lab import estimate
from helpers.lab.trials import FASTER, Program, programs, trees, trial

OURS = "TRIALS_OF_THIS_TEST"
LONG_S = 300.0
CASES = Path(__file__).parents[3] / "data" / "cases"


def program(function: str, name: str = "", **arguments) -> Program:
    return Program(name or function, function=f"programs:{function}", arguments=arguments, folder=str(CASES))


def ours() -> list[int]:
    """The living processes of this test's trials, and their guards, which end after them."""
    wanted = f"{OURS}={os.getpid()}".encode()
    return [int(f.parent.name) for f in Path("/proc").glob("[0-9]*/environ") if wanted in _read(f).split(b"\0")]


def until(condition) -> None:
    """Wait for an event; a machine may be as slow as it likes."""
    end = time.monotonic() + LONG_S
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.02)


def _read(file: Path) -> bytes:
    try:
        return file.read_bytes()
    except OSError:
        return b""


@pytest.fixture(autouse=True)
def load(monkeypatch):
    """The cores that others use: none, unless a test says so."""
    others = SimpleNamespace(cores=0.0)
    monkeypatch.setattr(programs, "OthersLoad", lambda: contextlib.nullcontext(others))
    return others


@pytest.fixture(autouse=True)
def _nothing_is_left(monkeypatch):
    monkeypatch.setenv(OURS, str(os.getpid()))
    yield
    assert not ours()


def test_half_the_time_is_faster_and_has_an_interval(monkeypatch):
    for module in (programs, estimate):
        monkeypatch.setattr(module, "PRECISION", 0.3)  # until then it goes on, however busy the machine is
    row = trial(program("sleep", "slow", ms=8), program("sleep", "fast", ms=4), seconds=LONG_S, drop=0, wanted=1)
    assert row["verdict"] == FASTER and row["starts"] == 1 and row["pairs"] >= 4
    assert row["low"] < 0.55 and 0.45 < row["high"] < 1
    assert row["baseline"] == "slow" and row["baseline_ms"] > row["median_ms"] >= 4


def test_a_worker_makes_nothing_ahead_while_the_other_has_the_turn():
    loader, slow = program("prefetch", "loader", ms=10), program("sleep", ms=50)
    row = trial(loader, slow, seconds=1, drop=1, turn_steps=3, wanted=1)
    assert row["baseline_ms"] > 7  # else its queue was full of what the worker had made meanwhile


@pytest.mark.parametrize(
    ("bad", "reason"),
    [
        (program("die", after=3), "die ended with code 1: no more steps"),
        (program("kill", after=3), "kill was killed, as when memory runs out"),
        (program("nothing"), "nothing ended with code 1: AttributeError"),
        (Program("absent", command=["/no/such/program"]), "absent does not start"),
    ],
    ids=lambda value: getattr(value, "name", ""),
)
def test_a_program_that_fails_is_a_row_with_its_reason(bad, reason):
    row = trial(program("sleep", ms=1), bad, seconds=2)
    assert list(row) == ["status"] and row["status"].startswith(reason)


def test_so_is_one_that_hangs(monkeypatch):
    monkeypatch.setattr(programs, "SILENCE_S", 1)
    hang = program("sleep", "hang", ms=10**6)
    assert trial(hang, hang) == {"status": "hang hangs: no turn ended within 1 s"}


def test_pairs_beside_others_work_are_dropped_and_counted(load):
    load.cores = 1.5
    row = trial(program("sleep", ms=1), program("sleep", "same", ms=1), seconds=0.5)
    assert list(row) == ["status"] and "pairs beside others' work" in row["status"]


@contextlib.contextmanager
def started(target, *arguments):
    """A process forked for a trial of two equal programs."""
    process = multiprocessing.get_context("fork").Process(target=target, args=arguments, kwargs={"seconds": LONG_S})
    process.start()
    yield process
    process.join()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_whatever_ends_the_trial_no_process_is_left(number):
    one = program("prefetch", ms=5)
    with started(trial, one, one) as trying:
        until(lambda: len(ours()) >= 5)  # two guards, a program, its worker, and more
        os.kill(trying.pid, number)
    until(lambda: not ours())


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_nor_is_one_that_lost_its_environment(number, tmp_path):
    one = program("unmarked", folder=str(tmp_path))
    with started(trial, one, one) as trying:
        until(lambda: len(list(tmp_path.iterdir())) == 4)
        os.kill(trying.pid, number)
    until(lambda: not ours())
    assert not any(_read(Path("/proc", file.name, "cmdline")) for file in tmp_path.iterdir())


def test_nor_if_a_child_of_the_trials_process_has_copies_of_its_pipes():
    reading, writing = os.pipe()
    with started(_fork_beside, program("prefetch", ms=5), writing):
        child = int(os.read(reading, 9))
    try:
        until(lambda: not ours())
    finally:
        os.kill(child, signal.SIGKILL)


def _fork_beside(one: Program, pipe: int, seconds: float) -> None:
    with programs.living([one, one], seconds):
        child = os.fork()
        if not child:
            signal.pause()
        os.write(pipe, b"%d" % child)
        os.kill(os.getpid(), signal.SIGKILL)


def test_the_guard_waits_for_a_process_that_has_no_mark_yet():
    """As between fork and exec, where a busy machine may leave a process for seconds."""
    answers, theirs = os.pipe()
    guard = trees.guard("late", answers)
    late = subprocess.Popen(
        ["sh", "-c", f"read go; {trees.MARK}=late exec sleep 1000"], stdin=subprocess.PIPE, pass_fds=[theirs]
    )
    os.close(theirs)
    guard.stdin.close()
    with pytest.raises(subprocess.TimeoutExpired):
        guard.wait(timeout=0.5)
    late.stdin.write(b"go\n")
    late.stdin.close()
    assert late.wait(timeout=LONG_S) == -signal.SIGKILL
    assert guard.wait(timeout=LONG_S) == 0
    os.close(answers)
