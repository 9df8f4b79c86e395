"""Profile a training script as it is: run it, find its iterations, record a few of them, stop it.

    recording = record_script("train.py", ["--epochs", "3"])      # as `python train.py --epochs 3` would run it
    diagnose(recording.folder)

An iteration ends when the step of an optimizer returns; of several optimizers, or one per layer, the last in the cycle
ends it. Micro-batches belong to the step after them, and so does an iteration whose step a gradient scaler skips.
After a warm-up two windows are recorded: one without stacks, whose times are close to those of the unprofiled script,
and one with stacks, which names the lines of source. Outside of the windows an iteration costs a few microseconds.

Only the process and the thread that train are recorded, of DataLoader's workers their dearest lines. Under torchrun
each rank saves a profile of its own. torch runs one profiler at a time, so a script that starts one itself can't be
recorded.
"""

import contextlib
import functools
import os
import re
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.optim import Optimizer

from ..lab.machine import OthersLoad
from . import hooks
from .children import started_recorded
from .loader_workers import Workers, watched_workers
from .observation import OBSERVED, Observation
from .running import UNSEEN, Stop, compiled, counted_steps, run_script, stop_after
from .stacks import user_line
from .windows import OwnProfiler, Plan, Windows

OWN_PROFILER = (
    "starts a profiler of its own, and torch runs one at a time: switch it off, or read the trace that it writes with "
    "`dlspeed diagnose`"
)
READ_EARLY = ("OMP_NUM_THREADS", "MKL_NUM_THREADS")  # by torch, when it is imported
CLAIM = "recorded"  # a file of the process that is recorded, of several that a script starts
PATIENCE = 10  # times the limit until the first step: data may be prepared before
EARLIER = re.compile(r"(costs|places|slowest|rank\d+)\.json\.gz|observed\d*\.json|recorded")  # of an earlier run


class NothingRecorded(Exception):
    """The script ended before a whole iteration was recorded, or nothing can be saved; says why in one line.

    `observation` is what was seen until then.
    """

    def __init__(self, reason: str, observation: Observation | None = None) -> None:
        super().__init__(reason)
        self.observation = observation


@dataclass(frozen=True)
class Recording:
    """The profiles that were saved: one for costs, one with lines of source (None if the script ended before it)."""

    folder: Path
    costs: Path
    places: Path | None
    rank: int = 0  # this process's
    note: str = ""  # what is missing, and why
    code: Any = None  # what the script gave to sys.exit


def record_script(
    script: str | Path,
    arguments: Sequence[str] = (),
    plan: Plan = Plan(),  # noqa: B008 (it can't be changed)
    *,
    module: bool = False,
    output: str | Path | None = None,
    tell: Callable[[str], None] = lambda line: None,
) -> Recording:
    """Run a script (`module=True`: a module), observe its loop, record the iterations of a plan, and save all of it.

    `tell` gets lines of progress. `output` is the folder of the profiles, by default profile-NAME in the current one.
    The script's own errors are raised as they are (`script_frames` takes ours out of their tracebacks), a sys.exit
    other than 0 too unless something was recorded; NothingRecorded if it ended before an iteration was recorded whole.
    """
    script, process = str(script), os.getpid()
    name = script.split(".")[-1] if module else Path(script).stem
    rank, ranks = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    folder = _emptied(Path(output or f"profile-{name}").resolve(), rank)
    if plan.minutes and ranks > 1:
        raise NothingRecorded("--watch is for one process: the ranks of a job all end at the same iteration")
    windows = Windows(folder, plan, rank, ranks)
    variables = {name: os.environ.get(name) for name in READ_EARLY}
    # Kept until the profiles are saved, which don't own the names of its functions.
    program = script if module else compiled(script)
    then = "goes on to its end" if plan.go_on else f"is stopped, after {plan.seconds:.0f} s at the latest"
    tell(f"running {script}: it is watched, a few iterations are recorded, and it {then}")
    load = OthersLoad()
    workers = Workers()
    try:
        with load:
            code = _run(program, [script, *map(str, arguments)], windows, workers, tell)
    finally:
        windows.close()
        crowded = load.cores and load.cores + torch.get_num_threads() > (os.cpu_count() or 1)
        others = load.cores if crowded and ranks == 1 else None  # other ranks are no strangers
        seen = windows.observation(workers, others)
        if os.getpid() == process and seen.iterations:
            seen.write(folder / (f"observed{rank}.json" if ranks > 1 else OBSERVED))
    if os.getpid() != process:  # a fork of the script's
        raise SystemExit(code)
    if not windows.costs.path.exists():
        raise _nothing(script, windows, seen, code)
    if windows.disturbed:
        notes = [f"{script} {OWN_PROFILER}"]
    elif windows.iterations:
        notes = [windows.missing(script)]
    else:
        notes = [f"what was recorded is a process that {script} started"]
    late = [name for name, value in variables.items() if os.environ.get(name) != value]
    notes += [f"{script} sets {name}, which torch had read before: set it in the shell" for name in late]
    if ranks > 1 and rank == 0:
        notes += [f"{file.name} is missing" for file in _await_ranks(folder, ranks)]
    places = windows.places.path if windows.places.path.exists() else None
    return Recording(folder, windows.costs.path, places, rank, "\n".join(filter(None, notes)), code)


def _emptied(folder: Path, rank: int) -> Path:
    """The folder without an earlier run's files, before any rank has trained."""
    if not os.access(next(place for place in (folder, *folder.parents) if place.exists()), os.W_OK):
        raise NothingRecorded(f"{folder} can't be written: name another folder (--output)")
    for file in folder.glob("*") if rank == 0 else ():
        if EARLIER.fullmatch(file.name):
            file.unlink()
    return folder


def _run(program: Any, argv: list[str], windows: Windows, workers: Workers, tell: Callable[[str], None]) -> Any:
    """Run the script until the windows are over; what it gave to sys.exit."""
    folder, plan = windows.costs.path.parent, windows.plan
    limited = windows.ranks == 1 and not plan.go_on
    late = f"no optimizer has stepped in {plan.limit:.0f} s (--limit): after {PATIENCE * plan.limit:.0f} s it is ended"
    reminder = threading.Timer(plan.limit, tell, [late])
    reminder.daemon = True

    def begun() -> bool:
        reminder.cancel()
        if limited and threading.current_thread() is threading.main_thread():
            stop_after(plan.seconds)
        return False

    with contextlib.ExitStack() as around:
        around.enter_context(recorded(windows, workers, stops=not plan.go_on, tell=tell, claim=begun))
        if limited:
            around.enter_context(_stopped_by_alarm())
            stop_after(PATIENCE * plan.limit)
            around.callback(reminder.cancel)
            reminder.start()
        if windows.ranks == 1:
            record = functools.partial(_record_started, folder=folder, plan=plan)
            stops = plan.seconds if limited else 0.0
            around.enter_context(started_recorded(record, folder / CLAIM, folder / OBSERVED, stops))
        return run_script(program, argv)


@contextlib.contextmanager
def recorded(
    windows: Windows,
    workers: Workers,
    *,
    stops: bool,
    tell: Callable[[str], None] = lambda line: None,
    claim: Callable[[], bool] = bool,
) -> Iterator[None]:
    """Around a training: its steps are told to the windows, whose end raises `Stop` if it `stops`.

    `workers` gets the loaders' workers' lines. The monitor's switches are put back first, then what tells when workers
    start. Nothing is recorded where `claim`, called after the first step, says so by True.
    """
    began = time.monotonic()

    def stepped(optimizer: Optimizer | None) -> None:
        if not windows.iterations and windows.are_of_this_process:
            tell(f"the first iteration ended after {time.monotonic() - began:.1f} s")
            if claim():
                windows.close()
        if windows.stepped(optimizer) and stops:
            raise Stop if threading.current_thread() is threading.main_thread() else SystemExit

    def profiled(start: Callable[..., None], profiler: torch.profiler.profile) -> None:
        """The script starts a profiler of its own: the windows end."""
        if not isinstance(profiler, OwnProfiler):
            windows.disturbed = True
            windows.close()
            if stops:
                raise Stop
        start(profiler)

    with (
        counted_steps(stepped),
        hooks.wrap({hooks.PROFILER: profiled}),
        windows.monitor.watching(),
        watched_workers(workers),
    ):
        try:
            yield
        finally:
            windows.monitor.stop()  # what follows is ours


def _record_started(call: Callable[[], Any], *, folder: Path, plan: Plan) -> None:
    """Run a call in a process that the script has started, and record it, unless another one is recorded already."""
    windows, workers = Windows(folder, plan, 0, 1), Workers()

    def claimed() -> bool:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            (folder / CLAIM).touch(exist_ok=False)
        except FileExistsError:
            return True
        return False

    try:
        with recorded(windows, workers, stops=not plan.go_on, claim=claimed):
            call()
    finally:
        windows.close()
        seen = windows.observation(workers)
        if windows.costs.path.exists() and windows.iterations > 1 and seen.iterations:
            seen.write(folder / OBSERVED)


def _nothing(script: str, windows: Windows, seen: Observation, code: Any) -> BaseException:
    """Why nothing was recorded."""
    if windows.disturbed:
        return NothingRecorded(f"{script} {OWN_PROFILER}", seen)
    if code:
        return SystemExit(code)
    ended = f"ended without an optimizer step: {UNSEEN.format('another program')}"
    if windows.iterations:
        ended = f"ended after {windows.iterations} iterations: at least 3 are needed, and --after + 3 for the windows"
    return NothingRecorded(f"{script} {ended}", seen)


def _await_ranks(folder: Path, ranks: int, seconds: float = 60.0) -> list[Path]:
    """Wait for the profiles of this machine's ranks; those that don't come."""
    deadline = time.monotonic() + seconds
    expected = [folder / f"rank{rank}.json.gz" for rank in range(int(os.environ.get("LOCAL_WORLD_SIZE", ranks)))]
    while not all(file.exists() for file in expected) and time.monotonic() < deadline:
        time.sleep(0.1)
    return [file for file in expected if not file.exists()]


@contextlib.contextmanager
def _stopped_by_alarm() -> Iterator[None]:
    """`Stop` is raised in the main thread when an alarm rings: see `stop_after`."""
    if threading.current_thread() is not threading.main_thread() or not hasattr(signal, "SIGALRM"):
        yield
        return

    def stop(_number: int, frame: Any) -> None:
        if user_line(frame)[1]:  # else it has ended
            raise Stop

    before = signal.signal(signal.SIGALRM, stop)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
