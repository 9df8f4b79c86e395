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
from types import FrameType
from typing import Any

import torch
from torch.utils.data._utils import fetch, worker

from . import hooks
from .monitor import SWITCH_S, looks
from .stacks import is_library, is_part, line_of

WRITE_S = 0.1
DEAREST = 20  # lines


@dataclass
class Workers:
    """What the workers of a loader did: their dearest lines with seconds, their processes, torch's threads in one."""

    lines: list[tuple[str, int, float]] = field(default_factory=list)
    processes: set[int] = field(default_factory=set)
    threads: int = 0

    def read(self, folder: Path) -> None:
        total: Any = Counter()
        for file in folder.glob("*.json"):
            held = json.loads(file.read_text())
            self.processes.add(int(file.stem))
            self.threads = max(self.threads, held["threads"])
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
        threading.Thread(target=_look, args=(threading.get_ident(), file), daemon=True).start()
        loop(*arguments, **named)

    try:
        with hooks.wrap({hooks.WORKER: looked_at}):
            yield
    finally:
        if os.getpid() == process:
            workers.read(folder)
            shutil.rmtree(folder, ignore_errors=True)


def _look(thread: int, file: Path) -> None:
    seen: Any = Counter()
    part, written = file.with_suffix(".part"), 0.0
    for began, now, frame in looks(thread, threading.Event()):
        if line := loading_line(frame):
            seen[line] += now - began
        if now - written > WRITE_S:
            written = now
            with contextlib.suppress(OSError):  # the folder is gone: nobody looks any more
                lines = [[name, line, seconds] for (name, line), seconds in seen.items()]
                part.write_text(json.dumps({"threads": torch.get_num_threads(), "lines": lines}))
                part.replace(file)


def loading_line(frame: FrameType | None) -> tuple[str, int] | None:
    """The user's innermost line that makes a batch; else that which the loader calls. None while there is no work."""
    user: FrameType | None = None
    outer: FrameType | None = None
    while frame is not None and frame.f_code.co_filename != fetch.__file__:
        if frame.f_code.co_filename == worker.__file__:
            return None
        if not is_library(frame.f_code.co_filename) and (user is None or is_part(user.f_code)):
            user = frame
        frame, outer = frame.f_back, frame
    at = user or outer
    return (at.f_code.co_filename, line_of(at)) if frame is not None and at is not None else None
