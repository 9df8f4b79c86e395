"""A solution in a process of its own: a fork of one that has torch loaded, with limits, whose answers are bytes.

The process that forks compares nothing, so a solution finds no right answer in its memory.
"""

import contextlib
import importlib
import io
import math
import multiprocessing
import os
import resource
import signal
import sys
import tempfile
import time
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from typing import Any

import torch

from ..lab.checks.check import MISSING, RAISES, REPEATED, answers, told
from ..lab.memory import GIB, system_bytes
from ..lab.process import end_with_parent
from ..trying import landlock
from .exercises import EXERCISES

MOST_BYTES = 2**26  # of an answer, and of a file that a solution writes


@dataclass(frozen=True)
class Limits:
    """Of each solution: seconds of CPU time, memory, and seconds in all, as it may wait and the machine be busy."""

    seconds: float = 20.0
    gib: float = 2.0
    wall: float = 60.0


def get_ready() -> None:
    """In a process that forks: import once what many solutions would, as optimizers do when they first step."""
    end_with_parent()
    importlib.import_module("torch._dynamo")


def run_apart(name: str, source: str, limits: Limits) -> tuple[list[bytes], str]:
    """The answers of a solution to the lines of its check, and why there are no more; empty if all are there."""
    ours, theirs = multiprocessing.Pipe(duplex=False)
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        process = multiprocessing.get_context("fork").Process(target=_work, args=(theirs, name, source, folder, limits))
        process.start()
        theirs.close()
        try:
            return _received(ours, process, len(EXERCISES[name].lines()), limits)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # what it has started, too
            process.kill()
            process.join()
            ours.close()


def _received(ours: Connection, process: Any, count: int, limits: Limits) -> tuple[list[bytes], str]:
    given: list[bytes] = []
    deadline = time.monotonic() + limits.wall
    while len(given) < count:
        ready = wait([ours, process.sentinel], max(deadline - time.monotonic(), 0))
        if not ready:
            return given, f"no answer within {limits.wall:g} s"
        if not ours.poll():
            break
        try:
            given.append(ours.recv_bytes(MOST_BYTES))
        except EOFError:
            break
        except OSError:
            return given, f"an answer of more than {MOST_BYTES >> 20} MiB"
    else:
        return given, ""
    process.join(1)
    code = process.exitcode or 0
    if code == -signal.SIGXCPU:
        return given, f"no answer within {limits.seconds:g} s of CPU time"
    return given, f"its process was ended by {signal.Signals(-code).name}" if code < 0 else "its process ended"


def _work(connection: Connection, name: str, source: str, folder: str, limits: Limits) -> None:
    _confine(folder, limits)
    exercise, names = EXERCISES[name], {"__name__": "solution"}
    try:
        exec(compile(source, "solution", "exec"), names)
        given = answers(exercise.lines(names[name]))
    except NotImplementedError:
        given = iter([(MISSING, "")])
    except (Exception, SystemExit) as error:
        given = iter([(RAISES, told(error)), *[(REPEATED, "")] * (len(exercise.lines()) - 1)])
    for answer in given:
        _send(connection, answer)


def _send(connection: Connection, answer: tuple[str, Any]) -> None:
    """As bytes that `torch.load` reads without pickle, which could run code where they are read."""
    buffer = io.BytesIO()
    torch.save(answer, buffer)
    connection.send_bytes(buffer.getvalue())


def _confine(folder: str, limits: Limits) -> None:
    """A session, a folder and limits of its own, and nothing to print to."""
    os.setsid()
    end_with_parent()
    nothing = os.open(os.devnull, os.O_RDWR)
    for number in (0, 1, 2):
        os.dup2(nothing, number)
    os.chdir(folder)
    tempfile.tempdir = os.environ["TMPDIR"] = os.environ["TORCHINDUCTOR_CACHE_DIR"] = folder
    package = __package__.partition(".")[0]
    for loaded in [each for each in sys.modules if each.partition(".")[0] == package]:  # as notebooks call it
        sys.modules.setdefault("helpers" + loaded.removeprefix(package), sys.modules[loaded])
    torch.set_num_threads(1)
    memory = system_bytes("self/status VmData") + int(limits.gib * GIB)
    bounds = {"CPU": math.ceil(limits.seconds), "DATA": memory, "FSIZE": MOST_BYTES, "CORE": 0}
    for bound, most in bounds.items():
        resource.setrlimit(getattr(resource, f"RLIMIT_{bound}"), (most, most + 2))
    landlock.restrict([folder, os.devnull, "/dev/shm"], alone=True)
