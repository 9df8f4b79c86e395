"""Trees of processes: found by a mark in their environment, stopped, continued and ended as a whole.

A loader's workers and a launcher's ranks carry the mark that their parent was started with, also where they have a
session or a parent of their own by now. The processes are those of Linux's /proc.

    python -I -S trees.py MARK ANSWERS [DEATH]      # the guard: this file needs nothing but Python's library
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
OVER = b"over"  # what a guard is told when the tree has ended


class Tree:
    """The processes whose environment holds a mark, and all of the session that `leader`, the first of them, leads.

    Not all in that session have the mark: what sets its title in `ps` writes over its environment, and a worker may be
    started with another one.
    """

    def __init__(self, mark: str, leader: int | None = None) -> None:
        self.mark, self.leader = mark, leader

    def members(self) -> set[int]:
        """The living ones. It takes 50 µs for each process of the machine."""
        mark, found = f"{MARK}={self.mark}".encode(), set()
        for folder in Path("/proc").glob("[0-9]*"):
            pid = int(folder.name)
            with contextlib.suppress(OSError):
                led = os.getsid(pid) == self.leader and not _is_dead(folder)
                if led or mark in (folder / "environ").read_bytes().split(b"\0"):
                    found.add(pid)
        return found

    def stop(self) -> None:
        """Stop all of it. It is looked for until no new member appears: one may start another meanwhile."""
        stopped: set[int] = set()
        while new := self.members() - stopped:
            _signal(new, signal.SIGSTOP)
            stopped |= new

    def resume(self) -> None:
        _signal(self.members(), signal.SIGCONT)

    def end(self) -> None:
        """Kill all of it, stopped or not, and wait until it is gone."""
        deadline = time.monotonic() + CHILDREN_END_S
        while (living := self.members()) and time.monotonic() < deadline:
            _signal(living, signal.SIGKILL)
            time.sleep(0.01)


def guard(mark: str, answers: int) -> subprocess.Popen:
    """A process that ends the tree if this one dies without doing so, however it dies.

    `answers` is the reading end of a pipe whose other end the tree has. The guard's input takes a line with the leader,
    once there is one, and `OVER`; then it ends when nothing of the tree is left.
    """
    environment = {name: value for name, value in os.environ.items() if name != MARK}
    handles = [answers]
    # What this process forks has a copy of the guard's input, whose end may then come late: Linux tells the death, too.
    with contextlib.suppress(AttributeError, OSError):
        handles.append(os.pidfd_open(os.getpid()))
    try:
        return subprocess.Popen(
            [sys.executable, "-I", "-S", __file__, mark, *map(str, handles)],
            stdin=subprocess.PIPE,
            bufsize=0,
            pass_fds=handles,
            env=environment,
            start_new_session=True,
        )
    finally:
        for death in handles[1:]:
            os.close(death)


def _guard(mark: str, answers: int, *death: int) -> None:
    """Wait for `OVER`, for the end of the input or for the death of the process that has its other end, and kill.

    A process that is being forked or started has no mark for a moment, and on a busy machine a moment is long: it still
    has the other end of `answers`. So without a leader the end is when nobody has that end, either.
    """
    told = b""
    while not told.endswith(OVER):
        ready, _, _ = select.select([0, *death], [], [])
        more = os.read(0, 99) if 0 in ready else b""
        if not more:
            break
        told += more
    tree = Tree(mark, next((int(word) for word in told.split() if word.isdigit()), None))
    hung_up = select.poll()
    hung_up.register(answers, 0)  # POLLHUP is always told
    while (living := tree.members()) or not (tree.leader or hung_up.poll(0)):
        _signal(living, signal.SIGKILL)
        time.sleep(0.01)


def _is_dead(folder: Path) -> bool:
    """Whether a process has ended, and waits for its parent to notice."""
    return (folder / "stat").read_bytes().rpartition(b") ")[2][:1] in b"ZX"


def _signal(pids: set[int], number: int) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(pid, number)


if __name__ == "__main__":
    _guard(sys.argv[1], *map(int, sys.argv[2:]))
