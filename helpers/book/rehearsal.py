"""Every table at its smallest sizes, beside each other: does everything run here, and compute what the reference does?

Nothing is recorded: the times mean nothing while other processes use the same device. What a table checks before it
measures is checked.
"""

import contextlib
import multiprocessing
import os
import queue
import tempfile
import threading
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from unittest.mock import patch

from ..lab import machine
from ..lab.process import end_with_parent
from . import store
from .runner import measure
from .table import FAILED, Table

TABLE_S = 120.0  # a table that takes longer hangs
CORES_OF_ONE = {"cpu": 1, "cuda": 3}  # that a process is given


def rehearse(experiments: Iterable[Table], tell: Callable[[str], None] = print) -> list[str]:
    """The faults, one a line, after all tables have run; `tell` gets a line as soon as a table is done."""
    kind = machine.device().type
    processes = max((os.cpu_count() or 1) // CORES_OF_ONE[kind], 1)
    tables: queue.SimpleQueue[Table] = queue.SimpleQueue()
    for e in sorted(experiments, key=lambda e: -len(e.configurations("small")) * (e.worth.cpu or 1.0)):
        tables.put(e)  # the longest first
    of_processes = {"TQDM_DISABLE": "1", "OMP_NUM_THREADS": str(CORES_OF_ONE[kind])}  # and of those that they start
    faults: list[str] = []
    with contextlib.ExitStack() as ends:
        ends.enter_context(patch.dict(os.environ, of_processes))
        beside = [threading.Thread(target=_work_off, args=(tables, ends, faults, tell)) for _ in range(processes)]
        ends.callback(_drain, tables)
        for thread in beside:
            thread.start()
        for thread in beside:
            thread.join()
    return faults


def _work_off(
    tables: queue.SimpleQueue, ends: contextlib.ExitStack, faults: list[str], tell: Callable[[str], None]
) -> None:
    """Run tables in a process, one after another; where one takes it along or hangs, the next has a new one."""
    pool = _process(ends)
    with contextlib.suppress(queue.Empty):
        while True:
            e, began = tables.get_nowait(), time.monotonic()
            try:
                found = pool.submit(_small_rows, e).result(timeout=TABLE_S)
            except Exception as error:
                found = [f"{e.name}: {_reason(error)}"]
                _end(pool)
                pool = _process(ends)
            faults += found
            tell(f"{e.name}: {'; '.join(found) or 'right'}, {time.monotonic() - began:.1f} s")


def _drain(tables: queue.SimpleQueue) -> None:
    """Leave nothing to be started, where the threads are left by an interrupt."""
    with contextlib.suppress(queue.Empty):
        while True:
            tables.get_nowait()


def _small_rows(e: Table) -> list[str]:
    with tempfile.TemporaryDirectory() as folder:
        measure([e], "small", results=folder)
        rows = [row for file in Path(folder).rglob("*.csv") for row in store.read_rows(file)]
    return list(dict.fromkeys(f"{e.name}: {s}" for row in rows if (s := row[store.STATUS]).startswith(FAILED)))


def _process(ends: contextlib.ExitStack) -> ProcessPoolExecutor:
    pool = ProcessPoolExecutor(1, multiprocessing.get_context("spawn"), end_with_parent)
    ends.callback(_end, pool)
    return pool


def _end(pool: ProcessPoolExecutor) -> None:
    for process in list((pool._processes or {}).values()):
        process.kill()
    pool.shutdown(wait=False, cancel_futures=True)


def _reason(error: Exception) -> str:
    if isinstance(error, TimeoutError):
        return f"hangs: not done within {TABLE_S:.0f} s"
    if isinstance(error, BrokenProcessPool):
        return "its process was killed, or crashed"
    return f"{type(error).__name__}: {' '.join(str(error).split())}"
