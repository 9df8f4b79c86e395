"""Profile a training script as it is: run it, find its iterations, record a few of them, stop it.

    recording = watch("train.py", ["--epochs", "3"])      # as `python train.py --epochs 3` would run it
    diagnose(recording.costs)

An iteration ends when the step of an optimizer returns; of several optimizers, or one per layer, the last in the cycle
ends it. Micro-batches belong to the step after them, and so does an iteration whose step a gradient scaler skips.
After a warm-up two windows are recorded: one without stacks, whose times are close to those of the unprofiled script,
and one with stacks, which names the lines of source. Outside of the windows an iteration costs a few microseconds.

Only the process and the thread that train are recorded, of DataLoader's workers their dearest lines. Under torchrun
each rank saves a profile of its own. torch runs one profiler at a time, so a script that starts one itself can't be
watched.
"""

import contextlib
import functools
import gc
import json
import os
import re
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch.optim import Optimizer

from ..lab import files
from ..lab.machine import OthersLoad
from . import workers
from .run_script import Stop, compiled, run_script
from .stacks import user_line
from .windows import OwnProfiler, Windows

OWN_PROFILER = (
    "starts a profiler of its own, and torch runs one at a time: switch it off, or read the trace that it writes with "
    "`dlspeed diagnose`"
)
UNSEEN = (
    "steps of torch.optim in this process are seen, but not those of a process that it starts (torchrun … --no-python "
    "dlspeed profile SCRIPT) or of a replayed CUDA graph"
)


READ_EARLY = ("OMP_NUM_THREADS", "MKL_NUM_THREADS")  # by torch, when it is imported
OURS = re.compile(r"(costs|places|rank\d+)\.json\.gz|observed\d*\.json")  # an earlier run's
AGAIN_S = 5.0  # between attempts to stop a script whose time is up
BACKWARDS = 16  # of a script whose update rule is its own


class NothingRecorded(Exception):
    """The script ended before a whole iteration was recorded, or nothing can be saved; says why in one line.

    `observed` is what was seen until then, as a saved recording has it.
    """

    def __init__(self, reason: str, observed: dict[str, Any] | None = None) -> None:
        super().__init__(reason)
        self.observed = observed


@dataclass(frozen=True)
class Recording:
    """The profiles that were saved: one for costs, one with lines of source (None if the script ended before it)."""

    folder: Path
    costs: Path
    places: Path | None
    rank: int = 0  # this process's
    note: str = ""  # what is missing, and why
    code: Any = None  # what the script gave to sys.exit


def watch(
    script: str | Path,
    arguments: Sequence[str] = (),
    *,
    module: bool = False,
    steps: int = 8,
    after: int | None = None,
    go_on: bool = False,
    until_epoch: bool = False,
    minutes: float = 0.0,
    limit: float = 120.0,
    output: str | Path | None = None,
    tell: Callable[[str], None] = lambda line: None,
) -> Recording:
    """Run a script (`module=True`: a module), record up to `steps` iterations after the first `after`, and save them.

    `after` is 10: fewer where these take more than 30 s, more where DataLoader's workers prefetch many batches, as a
    loop that waits for them doesn't until these are used up. Unprofiled, it is observed (`observe`) for at least 20
    iterations and 8 s, `minutes` or `until_epoch` ended. Then the script is stopped, unless it may `go_on` to its end;
    after `limit` seconds what is known by then is kept. `tell` gets lines of progress. `output` is the folder of the
    profiles, by default profile-NAME in the current one. The script's own errors are raised as they are
    (`script_frames` takes ours out of their tracebacks), a sys.exit other than 0 too unless something was recorded;
    NothingRecorded if it ended before an iteration was recorded whole.
    """
    script, process = str(script), os.getpid()
    name = script.split(".")[-1] if module else Path(script).stem
    folder = Path(output or f"profile-{name}").resolve()
    rank, ranks = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    costs = folder / ("costs.json.gz" if ranks == 1 else f"rank{rank}.json.gz")
    places = folder / "places.json.gz"
    if not os.access(next(place for place in (folder, *folder.parents) if place.exists()), os.W_OK):
        raise NothingRecorded(f"{folder} can't be written: name another folder (--output)")
    if rank == 0:  # before any rank has trained
        for file in folder.glob("*.json*"):
            if OURS.fullmatch(file.name):
                file.unlink()
    if minutes and ranks > 1:
        raise NothingRecorded("--watch is for one process: the ranks of a job all end at the same iteration")
    limit += 60 * minutes
    windows = Windows(costs, places, steps, after, rank, ranks, until_epoch, minutes)
    variables = {name: os.environ.get(name) for name in READ_EARLY}

    def stepped(optimizer: Optimizer | None) -> None:
        if not windows.iterations:
            tell(f"the first iteration ended after {time.monotonic() - began:.1f} s")
        if windows.stepped(optimizer) and not go_on:
            raise Stop if threading.current_thread() is threading.main_thread() else SystemExit

    # Kept until the profiles are saved, which don't own the names of its functions.
    program = script if module else compiled(script)
    began, loading, load = time.monotonic(), [], OthersLoad()
    then = "goes on to its end" if go_on else f"is stopped, after {limit:.0f} s at the latest"
    tell(f"running {script}: it is watched, a few iterations are recorded, and it {then}")
    try:
        with (
            counted_steps(stepped),
            _alone(windows, go_on),
            windows.observer.watching(),
            load,
            workers.watching() as of_workers,
            _ended_after(limit if not go_on and ranks == 1 else 0.0),
        ):
            try:
                code = run_script(program, [script, *map(str, arguments)])
            finally:
                windows.observer.stop()  # what follows is ours
                loading = of_workers().most_common(20)
    finally:
        windows.close()
        observed = windows.observer.data() | {"workers": [[*line, seconds] for line, seconds in loading]}
        crowded = load.cores and load.cores + torch.get_num_threads() > (os.cpu_count() or 1)
        observed["others"] = load.cores if crowded and ranks == 1 else None  # other ranks are no strangers
        if os.getpid() == process and observed["iterations"]:
            files.write(folder / f"observed{rank if ranks > 1 else ''}.json", json.dumps(observed))
    if os.getpid() != process:  # a fork of the script's
        raise SystemExit(code)
    if costs.exists():
        notes = [f"{script} {OWN_PROFILER}" if windows.disturbed else windows.missing(script)]
        late = [name for name, value in variables.items() if os.environ.get(name) != value]
        notes += [f"{script} sets {name}, which torch had read before: set it in the shell" for name in late]
        if ranks > 1 and rank == 0:
            notes += [f"{file.name} is missing" for file in _await_ranks(folder, ranks)]
        return Recording(folder, costs, places if places.exists() else None, rank, "\n".join(filter(None, notes)), code)
    if windows.disturbed:
        raise NothingRecorded(f"{script} {OWN_PROFILER}", observed)
    if code:
        raise SystemExit(code)
    ended = f"ended without an optimizer step: {UNSEEN}"
    if windows.iterations:
        ended = f"ended after {windows.iterations} iterations: at least 3 are needed, and --after + 3 for the windows"
    raise NothingRecorded(f"{script} {ended}", observed)


def _await_ranks(folder: Path, ranks: int, seconds: float = 60.0) -> list[Path]:
    """Wait for the profiles of this machine's ranks; those that don't come."""
    deadline = time.monotonic() + seconds
    expected = [folder / f"rank{rank}.json.gz" for rank in range(int(os.environ.get("LOCAL_WORLD_SIZE", ranks)))]
    while not all(file.exists() for file in expected) and time.monotonic() < deadline:
        time.sleep(0.1)
    return [file for file in expected if not file.exists()]


@contextlib.contextmanager
def _ended_after(seconds: float) -> Iterator[None]:
    """Raise `Stop` in the main thread after so many seconds; 0: never.

    And every few seconds from then on, as what is raised inside of a destructor is lost.
    """
    if not seconds or threading.current_thread() is not threading.main_thread() or not hasattr(signal, "SIGALRM"):
        yield
        return

    def stop(_number: int, frame: Any) -> None:
        if user_line(frame)[1]:  # else it has ended
            raise Stop

    before = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, seconds, AGAIN_S)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


@contextlib.contextmanager
def counted_steps(ended: Callable[[Any], None]) -> Iterator[None]:
    """Call `ended(optimizer)` when a step of any optimizer has returned; a step inside a step is part of it.

    Where `BACKWARDS` backward passes were not followed by any step, each is taken for the end of an iteration (`None`).
    torch's own post hooks run inside the profiler's range `Optimizer.step#…`, which a mark made there would cut. A step
    in the backward pass counts when that is over: a profiler that starts or stops inside of one crashes.
    """
    originals = {}
    hook, backward = Optimizer.profile_hook_step, torch.autograd.backward
    waiting: list[Optimizer] = []
    unstepped = 0  # backward passes so far, of a script in which nothing has stepped
    already = len(_optimizers())

    @torch.compiler.disable
    def tell(optimizer: Optimizer, step: Callable[..., Any]) -> None:
        nonlocal unstepped
        if step is not type(optimizer).step:  # but a base's, which that calls
            return
        unstepped = -(10**9)
        if torch._C._current_graph_task_id() == -1:
            ended(optimizer)
        else:
            waiting.append(optimizer)

    @functools.wraps(backward)
    def whole_backward(*args: Any, **kwargs: Any) -> None:
        nonlocal unstepped
        backward(*args, **kwargs)
        unstepped += 1
        if unstepped == BACKWARDS and len(_optimizers()) > already:
            unstepped = -(10**9)  # micro-batches before a first step
        if unstepped > BACKWARDS and torch._C._current_graph_task_id() == -1:
            ended(None)
        while waiting and torch._C._current_graph_task_id() == -1:
            ended(waiting.pop(0))

    def counted(step: Any) -> Callable[..., Any]:
        step.hooked = True

        @functools.wraps(step)
        def told(*args: Any, **kwargs: Any) -> Any:
            result = step(*args, **kwargs)
            tell(args[0], told)
            return result

        originals[told] = step
        return told

    def kinds(base: Any) -> Iterator[Any]:
        for kind in base.__subclasses__():
            yield kind
            yield from kinds(kind)

    for kind in set(kinds(Optimizer)):  # those that had an instance
        if getattr(vars(kind).get("step"), "hooked", False):
            kind.step = counted(kind.step)
    hooked = staticmethod(lambda step: counted(hook(step)))
    try:
        with (
            mock.patch.object(Optimizer, "profile_hook_step", hooked),
            mock.patch.object(torch.autograd, "backward", whole_backward),
        ):
            yield
    finally:
        for kind in kinds(Optimizer):
            if vars(kind).get("step") in originals:
                kind.step = originals[kind.step]


def _optimizers() -> list[Optimizer]:
    return [each for each in gc.get_objects() if issubclass(type(each), Optimizer)]


@contextlib.contextmanager
def _alone(windows: Windows, go_on: bool) -> Iterator[None]:
    """End the windows, and the script unless it may go on, where it starts a profiler of its own."""
    start = torch.profiler.profile.start

    @functools.wraps(start)
    def started(profiler: torch.profiler.profile) -> None:
        if not isinstance(profiler, OwnProfiler):
            windows.disturbed = True
            windows.close()
            if not go_on:
                raise Stop
        start(profiler)

    with mock.patch.object(torch.profiler.profile, "start", started):
        yield
