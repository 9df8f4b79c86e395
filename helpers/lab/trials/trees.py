"""Trees of processes: found by a mark in their environment, stopped, continued and ended as a whole.

A loader's workers and a launcher's ranks carry the mark that their parent was started with, also where they have a
session or a parent of their own by now. The processes are those of Linux's /proc.

    python -I -S trees.py MARK PIPE        # the guard: this file needs nothing but Python's library
"""

import contextlib
import os
import select
import signal
import subprocess
import sys
import time
from pathlib import Path

MARK = "HELPERS_TRIAL"
CHILDREN_END_S = 10.0


def members(mark: str) -> list[int]:
    """The living processes whose environment holds this mark."""
    wanted, processes = f"{MARK}={mark}".encode(), []
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if wanted in (folder / "environ").read_bytes().split(b"\0"):
                processes.append(int(folder.name))
    return processes


def stop(mark: str) -> None:
    """Stop all of a tree. It is looked for until no new member appears: one may start another meanwhile."""
    stopped: set[int] = set()
    while new := set(members(mark)) - stopped:
        _signal(new, signal.SIGSTOP)
        stopped |= new


def resume(mark: str) -> None:
    _signal(members(mark), signal.SIGCONT)


def end(mark: str) -> None:
    """Kill all of a tree, stopped or not, and wait until it is gone."""
    deadline = time.monotonic() + CHILDREN_END_S
    while (living := members(mark)) and time.monotonic() < deadline:
        _signal(living, signal.SIGKILL)
        time.sleep(0.01)


def guard(mark: str, answers: int) -> subprocess.Popen:
    """A process that ends the tree if this one dies without doing so, however it dies.

    `answers` is the reading end of a pipe whose other end the tree has. Close the guard's input when the tree has
    ended; it ends when nothing of the tree is left.
    """
    environment = {name: value for name, value in os.environ.items() if name != MARK}
    return subprocess.Popen(
        [sys.executable, "-I", "-S", __file__, mark, str(answers)],
        stdin=subprocess.PIPE,
        pass_fds=[answers],
        env=environment,
        start_new_session=True,
    )


def _guard(mark: str, answers: int) -> None:
    """Wait for the end of the input, which comes with the death of the process that has its other end, and kill.

    A process that is being forked or started has no mark for a moment, and on a busy machine a moment is long: it still
    has the other end of `answers`. So the end is when both no marked process is found and nobody has that end.
    """
    sys.stdin.buffer.read()
    hung_up = select.poll()
    hung_up.register(answers, 0)  # POLLHUP is always told
    while (living := members(mark)) or not hung_up.poll(20):
        _signal(living, signal.SIGKILL)


def _signal(pids, number: int) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(pid, number)


if __name__ == "__main__":
    _guard(sys.argv[1], int(sys.argv[2]))
