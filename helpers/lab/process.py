"""A measurement in a process of its own, with an environment of its own.

What ran before in a process changes what is measured after it: memory that the allocator keeps or has given back,
threads, compiled code. And glibc reads its allocator's settings once, when a process starts.
"""

import contextlib
import multiprocessing.connection
import os
import signal
import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from typing import Any
from unittest import mock


def in_fresh_process(
    fn: Callable[..., Any], *arguments: Any, environment: Mapping[str, str] | None = None, **options: Any
) -> Any:
    """`fn(*arguments, **options)` in a new process, whose environment has these variables too.

    It takes 2 s to start. `fn` is a function of a module; its arguments and its result must be picklable. An error
    is raised here; a process that is killed, as the kernel does when memory runs out, is a `MemoryError`. It ends with
    this process, and with an interrupt of this call.
    """
    with mock.patch.dict(os.environ, environment or {}), workers(1, "spawn") as pool:
        try:
            with without_ctrl_c():
                answer = pool.submit(fn, *arguments, **options)
            return answer.result()
        except BrokenProcessPool:
            raise MemoryError("the process was killed; it was out of memory, or crashed") from None


@contextlib.contextmanager
def workers(processes: int, method: str) -> Iterator[ProcessPoolExecutor]:
    """A pool whose processes end with this one, and with an interrupt of the block."""
    with ProcessPoolExecutor(processes, multiprocessing.get_context(method), end_with_parent) as pool:
        try:
            yield pool
        except KeyboardInterrupt:
            for process in pool._processes.values():  # the end of `with` waits for what they compute
                process.kill()
            raise


@contextlib.contextmanager
def without_ctrl_c() -> Iterator[None]:
    """Processes that start in this block aren't interrupted by Ctrl-C: it is this process's to end them."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def end_with_parent() -> None:
    """End this process when the one that started it has died, which a pool's worker doesn't notice."""
    ends = [multiprocessing.parent_process().sentinel]
    threading.Thread(target=lambda: os._exit(len(multiprocessing.connection.wait(ends))), daemon=True).start()
