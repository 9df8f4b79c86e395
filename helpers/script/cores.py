"""Whose CPU seconds pass while a loop runs: its own threads', those of processes that it started, and of others.

From Linux's /proc, once a second and later less often, in some milliseconds. The kernel counts for each thread how
long it was ready to run and had no core (`schedstat`): so it is seen, not guessed, that the step's threads wait while
workers compute.
"""

import contextlib
import os
from collections import Counter
from pathlib import Path
from typing import Any

from ..lab.machine import cpu_ticks, descendants

LOOK_S = 1.0
WORKS = 0.1  # of the time: a thread that runs so much is one of the step's


class CoreWait:
    """How long a thread was ready to run and had no core; 0 where the kernel doesn't tell. A look takes 3 µs."""

    def __init__(self) -> None:
        self._file, self._last = -1, 0

    def begin(self, thread: int) -> None:
        with contextlib.suppress(OSError):
            self._file = os.open(f"/proc/self/task/{thread}/schedstat", os.O_RDONLY)
        self.passed()

    def passed(self) -> float:
        """Seconds since the last call, unless the thread has ended."""
        last = self._last
        with contextlib.suppress(OSError):
            self._last = int(os.pread(self._file, 64, 0).split()[1])
        return (self._last - last) / 1e9


class Cores:
    """Told of the passing time by the thread that looks at the loop."""

    def __init__(self) -> None:
        self.seconds = 0.0  # that were looked at
        self._last: tuple[float, float, Any] | None = None  # when, away until then, what was counted
        self._ran: Counter[int] = Counter()  # by thread
        self._waited: Counter[int] = Counter()  # for a core
        self._children: Counter[int] = Counter()
        self._all, self._main = 0.0, 0

    def look(self, now: float, away_s: float, main: int) -> None:
        """Count what passed since the last look, unless the loop was recorded meanwhile."""
        if self._last and now - self._last[0] < max(LOOK_S, self.seconds / 20):
            return
        counted = _counted()
        if self._last and away_s == self._last[1] and counted and self._last[2]:
            self.seconds += now - self._last[0]
            for total, after, before in zip(
                (self._ran, self._waited, self._children), counted, self._last[2], strict=False
            ):
                total.update({name: value - before[name] for name, value in after.items() if name in before})
            self._all += counted[3] - self._last[2][3]
        self._last, self._main = (now, away_s, counted), main

    def data(self, workers: set[int]) -> dict[str, Any]:
        """Cores that each used in the mean, and the share of the time that the step's threads waited for one."""
        if self.seconds < LOOK_S:
            return {}
        ran, children = self._ran.total() / self.seconds, self._children.total() / self.seconds
        step = [thread for thread, busy in self._ran.items() if busy >= WORKS * self.seconds or thread == self._main]
        loading = {pid: busy / self.seconds for pid, busy in self._children.items() if pid in workers}
        return {
            "cores": len(os.sched_getaffinity(0)),
            "main": self._ran[self._main] / self.seconds,
            "threads": ran - self._ran[self._main] / self.seconds,
            "waited": sum(self._waited[thread] for thread in step) / self.seconds,
            "workers": sorted(loading.values(), reverse=True),
            "children": children - sum(loading.values()),
            "others": max(self._all / self.seconds - ran - children, 0.0),
        }


def _counted() -> tuple[Any, Any, Any, float] | None:
    """Seconds that each thread of ours ran and waited for a core, that each descendant ran, and that all cores did."""
    ran, waited = {}, {}
    try:
        for thread in os.listdir("/proc/self/task"):
            with contextlib.suppress(OSError):
                running, waiting, _ = Path(f"/proc/self/task/{thread}/schedstat").read_text().split()
                ran[int(thread)], waited[int(thread)] = int(running) / 1e9, int(waiting) / 1e9
        user, nice, system, _idle, _wait, irq, softirq, *_ = Path("/proc/stat").read_text().split()[1:9]
        ticks = os.sysconf("SC_CLK_TCK")
        children = {int(pid): cpu_ticks(pid) / ticks for pid in descendants()}
        return ran, waited, children, sum(map(int, (user, nice, system, irq, softirq))) / ticks
    except (OSError, ValueError):
        return None
