"""Where the workers of a DataLoader spend their time: a thread in each looks at the stack of the one that loads.

A worker may be killed at any time, so it writes what it saw to a file ten times a second. Workers that are spawned, not
forked, aren't seen.
"""

import contextlib
import json
import os
import shutil
import sys
import tempfile
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import CodeType
from typing import Any

from torch.utils.data._utils import fetch, worker

from . import hooks
from .stacks import SWITCH_S, Calling, Line, is_library, is_part, line_at, looks, user_line

WRITE_S = 0.1
DEAREST = 20  # lines


@dataclass
class Workers:
    """What the workers of a loader did: their dearest lines with seconds, their processes, torch's threads in one.

    `set_at` is the file and line that sets their number.
    """

    lines: list[tuple[str, int, float]] = field(default_factory=list)
    processes: set[int] = field(default_factory=set)
    threads: int = 0
    set_at: Line | None = None

    def read(self, folder: Path) -> None:
        total: Any = Counter()
        for file in folder.glob("*.json"):
            held = json.loads(file.read_text())
            self.processes.add(int(file.stem))
            if held["threads"] > self.threads:
                self.threads, self.set_at = held["threads"], held["set_at"]
            for name, line, seconds in held["lines"]:
                total[name, line] += seconds
        self.lines = [(*line, seconds) for line, seconds in total.most_common(DEAREST)]


@contextlib.contextmanager
def watched_workers(workers: Workers) -> Iterator[None]:
    """See what the workers that start meanwhile do."""
    process, folder = os.getpid(), Path(tempfile.mkdtemp(prefix="workers-"))

    def looked_at(loop: Callable[..., None], *arguments: Any, **named: Any) -> None:
        sys.setswitchinterval(SWITCH_S)
        file = folder / f"{os.getpid()}.json"
        threads: dict[str, Any] = {"threads": 1, "set_at": None}  # as the loader sets it

        def counted(set_threads: Callable[[int], None], number: int) -> None:
            set_threads(number)  # of which torch tells another thread only what held when that one first asked
            threads.update(threads=number, set_at=user_line(sys._getframe(2)))

        hooks.wrap({hooks.THREADS: counted})
        threading.Thread(target=_look, args=(threading.get_ident(), file, threads), daemon=True).start()
        loop(*arguments, **named)

    try:
        with hooks.wrap({hooks.WORKER: looked_at}):
            yield
    finally:
        if os.getpid() == process:
            workers.read(folder)
            shutil.rmtree(folder, ignore_errors=True)


def _look(thread: int, file: Path, threads: dict[str, Any]) -> None:
    seen: Any = Counter()
    part, written = file.with_suffix(".part"), 0.0
    for began, now, calling in looks(thread, threading.Event()):
        if line := loading_line(calling):
            seen[line] += now - began
        if now - written > WRITE_S:
            written = now
            with contextlib.suppress(OSError):  # the folder is gone: nobody looks any more
                lines = [[name, line, seconds] for (name, line), seconds in seen.items()]
                part.write_text(json.dumps(threads | {"lines": lines}))
                part.replace(file)


def loading_line(calling: Calling) -> tuple[str, int] | None:
    """The user's innermost line that makes a batch; else that which the loader calls. None while there is no work."""
    user: tuple[CodeType, int] | None = None
    outer: tuple[CodeType, int] | None = None
    for call in calling:
        code, _ = call
        if code.co_filename == fetch.__file__:
            at = user or outer
            return (at[0].co_filename, line_at(*at)) if at is not None else None
        if code.co_filename == worker.__file__:
            return None
        if not is_library(code.co_filename) and (user is None or is_part(user[0])):
            user = call
        outer = call
    return None
