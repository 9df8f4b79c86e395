"""A training loop of this process, observed and recorded like a script's, wherever it is called: a notebook, a REPL."""

import contextlib
import tempfile
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

from ..script.loader_workers import Workers
from ..script.observation import OBSERVED
from ..script.recording import NothingRecorded, recorded
from ..script.running import UNSEEN, Stop
from ..script.windows import Plan, Windows
from .diagnose import diagnose


@contextlib.contextmanager
def watch(
    *, steps: int = 8, after: int | None = None, stop: bool = False, output: str | Path | None = None
) -> Iterator:
    """Record `steps` iterations of the loop inside, and print the diagnosis when it has ended.

        with helpers.watch() as watched:
            train(model, loader)
        watched.diagnosis.findings

    With `stop` the loop ends as soon as enough is known, as `dlspeed profile` ends a script: what it has done until
    then stays done. `output` keeps the profiles. A loop of fewer than some twenty iterations may be too short.
    """
    with tempfile.TemporaryDirectory(prefix="watch-") as scratch:
        folder = Path(output or scratch)
        workers = Workers()
        folder.mkdir(parents=True, exist_ok=True)
        windows = Windows(folder, Plan(steps, after, go_on=not stop), rank=0, ranks=1)
        watched = SimpleNamespace(diagnosis=None)
        try:
            with contextlib.suppress(Stop), recorded(windows, workers, stops=stop):
                yield watched
        finally:
            windows.close()
        if not windows.costs.path.exists():
            raise NothingRecorded(
                f"{windows.iterations} iterations ended in this block, too few: {UNSEEN.format('a process')}"
            )
        windows.observation(workers).write(folder / OBSERVED)
        watched.diagnosis = diagnose(folder)
        print(watched.diagnosis)
