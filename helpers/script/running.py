"""Run a training script as `python SCRIPT` would, in this process, and be told of each optimizer's step."""

import builtins
import contextlib
import functools
import gc
import multiprocessing
import os
import runpy
import signal
import sys
import types
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any
from unittest import mock
from weakref import WeakKeyDictionary, ref

import torch
from torch.optim import Optimizer

from ..lab.memory import end_loader_workers
from . import hooks

PACKAGE = Path(__file__).resolve().parents[1]
# Whose frames are around a script that runs
OWN_FILES = {str(PACKAGE / name) for name in ("__main__.py", "boot.py")}
OWN_FILES |= {str(path) for room in (PACKAGE / "cli", Path(__file__).parent) for path in room.glob("*.py")}
RUNPY = (runpy.__file__, "<frozen runpy>")
# Variables for a run that tells nobody of itself, writes nothing beside the script and draws nothing by chance
QUIET = {
    "WANDB_MODE": "disabled",
    "WANDB_DISABLED": "true",
    "MLFLOW_TRACKING_URI": "file:./mlruns",
    "COMET_MODE": "DISABLED",
    "NEPTUNE_MODE": "debug",
    "CLEARML_OFFLINE_MODE": "1",
    "HF_HUB_DISABLE_TELEMETRY": "1",
    "PYTHONDONTWRITEBYTECODE": "1",
    "PYTHONHASHSEED": "0",
}
AGAIN_S = 5.0  # between attempts to stop a script
ENDS_S = 5.0  # that a killed process has to be gone
BACKWARDS = 16  # of a script whose update rule is its own
RARE = 8  # steps of one optimizer between two of another: the latter doesn't end the iterations
UNSEEN = (
    "steps of torch.optim in this process are seen, but not those of {} that it starts (torchrun … --no-python "
    "dlspeed profile SCRIPT) or of a replayed CUDA graph"
)


class Stop(BaseException):
    """Ends the script inside its last recorded step; not an Exception, which scripts catch."""


def stop_after(seconds: float) -> None:
    """Let the alarm ring that stops the script, and every few seconds from then on; 0: never.

    Once isn't enough, as what is raised inside of a destructor is lost.
    """
    if hasattr(signal, "setitimer"):
        signal.setitimer(signal.ITIMER_REAL, seconds, AGAIN_S if seconds else 0.0)


def run_script(program: types.CodeType | str, argv: Sequence[str]) -> Any:
    """Run a file's code as `python FILE` does, or a module as `python -m MODULE`; returns what it passed to sys.exit.

    Processes that it spawns import it from `sys.modules["__main__"]`.
    """
    home = Path.cwd() if isinstance(program, str) else Path(program.co_filename).resolve().parent
    path, main, folder = list(sys.path), sys.modules["__main__"], Path.cwd()
    gradients, running = torch.is_grad_enabled(), None
    if not sys.flags.safe_path:
        sys.path[0] = str(home)
    try:
        with mock.patch.multiple(sys, argv=list(argv), stdout=sys.stdout, stderr=sys.stderr):
            if isinstance(program, str):
                runpy.run_module(program, run_name="__main__", alter_sys=True)
            else:
                sys.modules["__main__"] = running = types.ModuleType("__main__")
                vars(running).update(__file__=program.co_filename, __builtins__=builtins, __cached__=None)
                exec(program, vars(running))
    except Stop:
        stop_after(0.0)  # it isn't stopped again in what follows
        end_loader_workers()
        for process in (killed := multiprocessing.active_children()):  # Python would wait for them at its own end
            process.kill()
        for process in killed:
            process.join(ENDS_S)
    except SystemExit as end:
        return end.code
    finally:
        sys.path[:], sys.modules["__main__"] = path, main
        torch._C._set_grad_enabled(gradients)  # off if the script was stopped while its optimizer put them on again
        os.chdir(folder)
        end_loader_workers()
        running = None  # its objects go while looks see that this function runs
    return None


def compiled(script: str | Path) -> types.CodeType:
    return compile(Path(script).read_bytes(), os.path.abspath(script), "exec", dont_inherit=True)


def script_frames(traceback: types.TracebackType | None) -> types.TracebackType | None:
    """A traceback without the frames that running a script here adds."""
    frames = []
    while traceback is not None:
        frames.append(traceback)
        traceback = traceback.tb_next
    of_script = None
    for frame in reversed(frames):
        if frame.tb_frame.f_code.co_filename not in (*OWN_FILES, *RUNPY):
            of_script = types.TracebackType(of_script, frame.tb_frame, frame.tb_lasti, frame.tb_lineno)
    return of_script


@contextlib.contextmanager
def counted_steps(ended: Callable[[Optimizer | None], None]) -> Iterator[None]:
    """Call `ended(optimizer)` when a step of any optimizer has returned; a step inside a step is part of it.

    Where `BACKWARDS` backward passes were not followed by any step, each is taken for the end of an iteration (`None`).
    """
    counter = _StepCounter(ended)
    for kind in _optimizer_kinds():  # those that had an instance
        if getattr(vars(kind).get("step"), "hooked", False):
            kind.step = counter.counted(kind.step)
    try:
        with hooks.wrap({hooks.STEP_MADE: counter.step_made, hooks.BACKWARD: counter.backward}):
            yield
    finally:
        for kind in _optimizer_kinds():
            if vars(kind).get("step") in counter.originals:
                kind.step = counter.originals[kind.step]


class _StepCounter:
    """Wraps the steps of optimizers.

    torch's own post hooks run inside the profiler's range `Optimizer.step#…`, which a mark made there would cut. A step
    in the backward pass counts when that is over: a profiler that starts or stops inside of one crashes.
    """

    def __init__(self, ended: Callable[[Optimizer | None], None]) -> None:
        self.originals: dict[Any, Any] = {}
        self._ended = ended
        self._waiting: list[Optimizer] = []
        self._unstepped = 0  # backward passes so far, of a script in which nothing has stepped
        self._already = len(_optimizers())
        self._uncompiled = torch.compiler.disable(self._stepped)  # here, as it imports the compiler

    def step_made(self, made: Callable[[Any], Any], step: Any) -> Callable[..., Any]:
        return self.counted(made(step))

    def counted(self, step: Any) -> Callable[..., Any]:
        step.hooked = True

        @functools.wraps(step)
        def stepping(*args: Any, **kwargs: Any) -> Any:
            result = step(*args, **kwargs)
            self._uncompiled(args[0], stepping)
            return result

        self.originals[stepping] = step
        return stepping

    def _stepped(self, optimizer: Optimizer, step: Callable[..., Any]) -> None:
        if step is not type(optimizer).step:  # but a base's, which that calls
            return
        self._unstepped = -(10**9)
        if torch._C._current_graph_task_id() == -1:
            self._ended(optimizer)
        else:
            self._waiting.append(optimizer)

    def backward(self, backward: Callable[..., None], *args: Any, **kwargs: Any) -> None:
        backward(*args, **kwargs)
        self._unstepped += 1
        if self._unstepped == BACKWARDS and len(_optimizers()) > self._already:
            self._unstepped = -(10**9)  # micro-batches before a first step
        if self._unstepped > BACKWARDS and torch._C._current_graph_task_id() == -1:
            self._ended(None)
        while self._waiting and torch._C._current_graph_task_id() == -1:
            self._ended(self._waiting.pop(0))


def _optimizer_kinds(base: Any = Optimizer) -> set[Any]:
    kinds = set(base.__subclasses__())
    return kinds.union(*map(_optimizer_kinds, kinds))


def _optimizers() -> list[Optimizer]:
    return [each for each in gc.get_objects() if issubclass(type(each), Optimizer)]


def end_of_iteration() -> Callable[[Optimizer], bool]:
    """A function that is told of each optimizer's step, and says whether that ends an iteration.

    The optimizer that stepped first as the last one ends them: of a GAN's two the second, of one per layer that of the
    last layer to get its gradients. One that steps less than once in 8 steps of another doesn't.
    """
    known: WeakKeyDictionary[Optimizer, int] = WeakKeyDictionary()  # its steps since an iteration ended
    last = None

    def ends_iteration(optimizer: Optimizer) -> bool:
        nonlocal last
        if optimizer not in known:
            known[optimizer], last = 0, ref(optimizer)
            return False
        known[optimizer] += 1
        if last() is None or known[optimizer] > RARE:
            last = ref(optimizer)
        if last() is not optimizer:
            return False
        for other in known:
            known[other] = 0
        return True

    return ends_iteration
