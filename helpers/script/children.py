"""A training in a process that the script starts: it is recorded there, and the script is stopped with it.

Processes of `multiprocessing` and `torch.multiprocessing.spawn` count, forked or spawned, unless a library's pool,
server or loader starts them. Of several that train the first to end an iteration is recorded.
"""

import contextlib
import threading
from collections.abc import Callable, Iterator
from functools import partial
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from .. import boot
from . import hooks
from .running import Stop, stop_after

START = hooks.Point(BaseProcess, "start")
LIBRARIES = ("multiprocessing.", "concurrent.", "torch.utils.data.", "joblib.")  # whose processes train nothing
LOOK_S = 0.5  # between looks for what such a process saves


class _Started:
    """`run_started`, which a spawned process unpickles though it has no such module: it loads this package first."""

    def __call__(self, *arguments: Any, **options: Any) -> Any:
        return run_started(*arguments, **options)

    def __reduce__(self) -> Any:
        load = f"__import__('runpy').run_path({str(boot.FOLDER / 'boot.py')!r})['load']()"
        module = f"__import__('importlib').import_module('{boot.NAME}.script.children')"
        return eval, (f"({load}, {module})[1].run_started",)


def run_started(target: Callable[..., Any], record: Callable[..., Any], *arguments: Any, **options: Any) -> None:
    """In the started process: its target, recorded if it trains."""
    with contextlib.suppress(Stop):
        record(partial(target, *arguments, **options))


@contextlib.contextmanager
def started_recorded(record: Callable[..., Any], begun: Path, saved: Path, seconds: float) -> Iterator[None]:
    """Let processes that start meanwhile run by `record(call)`.

    The script is stopped when one has `saved` what it recorded, and so many seconds after it has `begun`; 0: never.
    """
    ended, ending = threading.Event(), threading.Lock()  # an alarm that is set after the end would kill this process

    def start(begin: Callable[..., None], process: Any) -> None:
        target = getattr(process, "_target", None)
        if target is not None and not str(target.__module__).startswith(LIBRARIES):
            process._target = partial(_Started(), target, record)
        begin(process)

    def watch() -> None:
        """What stops the script is raised in the main thread."""
        for file, after in ((begun, seconds), (saved, 1e-3)):
            while not file.exists():
                if ended.wait(LOOK_S):
                    return
            with ending:
                if not ended.is_set():
                    stop_after(after)

    if seconds:
        threading.Thread(target=watch, name="started processes", daemon=True).start()
    try:
        with hooks.wrap({START: start}):
            yield
    finally:
        with ending:
            ended.set()
