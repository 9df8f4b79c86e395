"""Trees of processes: found by a mark in their environment, stopped, continued and ended as a whole.

A loader's workers and a launcher's ranks carry the mark that their parent was started with, also where they have a
session or a parent of their own by now. The processes are those of Linux's /proc.
"""

import contextlib
import os
import signal
import subprocess
import time
from pathlib import Path

MARK = "HELPERS_TRIAL"
CHILDREN_END_S = 10.0

# Waits for the end of its input, which comes with the death of the process that started it however it dies, and kills
# what carries the mark. It has no mark itself.
_GUARD = """
cat >/dev/null
for p in /proc/[0-9]*; do grep -qsz "^$0\\$" $p/environ && kill -9 ${p#/proc/}; done
"""


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


def guard(mark: str) -> subprocess.Popen:
    """A process that ends the tree if this one dies without doing so; close its input when the tree has ended."""
    environment = {name: value for name, value in os.environ.items() if name != MARK}
    return subprocess.Popen(
        ["sh", "-c", _GUARD, f"{MARK}={mark}"], stdin=subprocess.PIPE, env=environment, start_new_session=True
    )


def _signal(pids, number: int) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(pid, number)
