"""A submission in a process of its own: a fork of one that has torch and this library loaded, with limits.

Its cells run one after the other in one process, which a fork leaves at each exercise to answer the lines of its check.
What ends a fork costs that exercise; what ends the process costs that cell: it starts anew without it. The processes
here compare nothing and have read no right answer, and answers are bytes.
"""

import codeop
import contextlib
import gc
import importlib
import importlib.util
import inspect
import io
import linecache
import math
import multiprocessing
import os
import pkgutil
import resource
import signal
import site
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any
from unittest import mock

import torch
from IPython import get_ipython
from IPython.display import display

from ..checks.check import MISSING, RAISES, Check, Checker, answers, told
from ..lab.files import cache_folder, project_root
from ..lab.memory import GIB, system_bytes
from ..lab.process import end_with_parent
from ..script import landlock
from .exercises import EXERCISES, Exercise

MOST_BYTES = 2**24  # of an answer
MOST_WRITTEN = 2**26  # bytes of a file
PACKAGE = __package__.partition(".")[0]
SYSTEM = "/usr", "/lib", "/lib64", "/bin", "/opt", "/etc", "/proc", "/sys", "/dev/null", "/dev/zero", "/dev/urandom"
SECRET = ".git", "data/solutions", "tests"  # of a checkout: what is right, in one form or another
FOR_NOTEBOOKS = ("book.notebook",)  # what they import beside this package's rooms
BEGINS, ANSWERS_WITH, FAILS, ENDS = "begins", "answers", "fails", "ends"  # the kinds of messages
PR_SET_CHILD_SUBREAPER = 36


@dataclass(frozen=True)
class Limits:
    """Seconds of CPU time for a cell or an exercise, for all cells together, and GiB of each process.

    As a process may wait and the machine be busy, `patience` times the seconds are the limit in all.
    """

    seconds: float = 20.0
    gib: float = 2.0
    cells: float = 60.0
    patience: float = 3.0

    @property
    def wall(self) -> float:
        return self.patience * self.seconds


@dataclass
class Ran:
    """By exercise: the answers to the lines of its check, why there are no more, and seconds; and what cells raised."""

    answers: dict[str, list[bytes]] = field(default_factory=dict)
    ended: dict[str, str] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)
    faults: dict[str, str] = field(default_factory=dict)

    def fails(self, step: str, reason: str) -> None:
        (self.ended if step in EXERCISES else self.faults)[step] = reason


def get_ready() -> None:
    """In a process that forks: import what submissions import, and see no GPU, which no fork could use."""
    os.environ |= {"CUDA_VISIBLE_DEVICES": "", "MPLBACKEND": "agg"}
    end_with_parent()
    rooms = [module.name for module in pkgutil.iter_modules(sys.modules[PACKAGE].__path__)]
    for name in ["torch._dynamo", *(f"{PACKAGE}.{name}" for name in [*rooms, *FOR_NOTEBOOKS] if name != "__main__")]:
        with contextlib.suppress(ImportError):
            importlib.import_module(name)
    landlock.ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)  # what a submission leaves behind is ours
    gc.freeze()


def run_apart(steps: Mapping[str, str], secret: list[str], seed: int, limits: Limits) -> Ran:
    """Run steps: the cells of a file, each a place and a source, and after what they need exercises, each a name.

    A cell that ends its process is left out when the others run again.
    """
    ran, left, spent = Ran(), dict(steps), 0.0
    while left and spent < limits.cells:
        begun = time.monotonic() - sum(ran.seconds.values())
        ours, theirs = multiprocessing.Pipe(duplex=False)
        with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
            arguments = theirs, left, folder, secret, seed, limits, limits.cells - spent
            process = multiprocessing.get_context("fork").Process(target=_work, args=arguments)
            process.start()
            theirs.close()
            try:
                step, seconds = _received(ours, process, ran, limits)
            finally:
                _end(process)
                ours.close()
        if step not in left:
            break
        spent += max(seconds, (time.monotonic() - sum(ran.seconds.values()) - begun) / limits.patience)
        left = {name: source for name, source in left.items() if name != step and name not in ran.ended}
    for name in [name for name in left if name in EXERCISES and name not in ran.ended]:
        ran.fails(name, f"the cells took {limits.cells:g} s of CPU time in all")
    return ran


def _received(ours: Connection, process: Any, ran: Ran, limits: Limits) -> tuple[str, float]:
    """Take what a process sends. The step at which it ended, "" after the last, and the CPU time of its cells."""
    step, deadline, begun = "start", time.monotonic() + limits.wall, time.monotonic()
    while True:
        if not wait([ours, process.sentinel], max(deadline - time.monotonic(), 0)):
            ran.fails(step, f"no answer within {limits.wall:g} s")
            return step, _cpu_seconds(process.pid)
        try:
            if not ours.poll():
                raise EOFError
            header, _, payload = ours.recv_bytes(MOST_BYTES).partition(b"\n")
        except OSError:
            ran.fails(step, f"an answer of more than {MOST_BYTES >> 20} MiB")
            return step, _cpu_seconds(process.pid)
        except EOFError:
            seconds = _cpu_seconds(process.pid)
            process.join(1)
            ran.fails(step, _ending(process.exitcode or 0, limits))
            return step, seconds
        kind, _, name = header.decode().partition(" ")
        if kind == BEGINS:
            step, begun, deadline = name, time.monotonic(), time.monotonic() + limits.wall + 5
            ran.answers.pop(step, None)
        elif kind == ANSWERS_WITH:
            ran.answers.setdefault(step, []).append(payload)
        elif kind == FAILS:
            ran.fails(step, payload.decode())
        elif not name:
            return "", 0.0
        else:
            ran.ended.setdefault(step, "")
            ran.seconds[step] = time.monotonic() - begun


def _ending(code: int, limits: Limits) -> str:
    if code == -signal.SIGXCPU:
        return f"no answer within {limits.seconds:g} s of CPU time"
    return f"its process was ended by {signal.Signals(-code).name}" if code < 0 else "its process ended"


def _cpu_seconds(process: int) -> float:
    """Of a process without its children, also when it has ended and nobody has asked for its exit code."""
    with contextlib.suppress(OSError, ValueError):
        fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    return 0.0


def _end(process: Any) -> None:
    """End a process and all that it has started: in its session, and beyond as far as Linux tells."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.kill()
    process.join()
    children = [path.read_text().split() for path in Path("/proc/self/task").glob("*/children")]
    for child in {int(number) for numbers in children for number in numbers}:
        with contextlib.suppress(ProcessLookupError, ChildProcessError):
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)


def _work(
    connection: Connection,
    steps: dict[str, str],
    folder: str,
    secret: list[str],
    seed: int,
    limits: Limits,
    cells: float,
) -> None:
    _confine(folder, secret, limits)
    mock.patch.object(Checker, "__call__", lambda check, *_, **__: Check(check.__name__)).start()  # judged apart
    script = any(place.startswith("line ") for place in steps)
    module = ModuleType("solution" if script else "__main__")
    module.__dict__.update(display=display, get_ipython=get_ipython)
    sys.modules[module.__name__] = module
    compiler, fault = codeop.Compile(), ""
    for step, source in steps.items():
        _send(connection, BEGINS, step)
        if step in EXERCISES:
            _ask(connection, EXERCISES[step], module.__dict__, fault, seed, limits)
            continue
        used = time.process_time()
        _limit("CPU", used + min(limits.seconds, cells - used), limits.cells + 2 * limits.seconds)
        try:
            _run(compiler, step, source, module.__dict__)
            fault = ""
        except BaseException as error:
            fault = f"{step}: {told(error)}"
            _send(connection, FAILS, step, told(error).encode())
    _send(connection, ENDS, "")


def _run(compiler: codeop.Compile, place: str, source: str, names: dict[str, Any]) -> None:
    linecache.cache[place] = len(source), None, source.splitlines(keepends=True), place  # for inspect, and so for torch
    exec(compiler(source, place, "exec"), names)


def _ask(connection: Connection, exercise: Exercise, names: dict, fault: str, seed: int, limits: Limits) -> None:
    """The answers of a fork, which begins with the memory that this process has."""
    arguments = connection, exercise, names, fault, seed, limits
    fork = multiprocessing.get_context("fork").Process(target=_answer, args=arguments)
    fork.start()
    fork.join(limits.wall)
    code = fork.exitcode
    if code is None:
        fork.kill()
        _send(connection, FAILS, exercise.name, f"no answer within {limits.wall:g} s".encode())
    elif code:
        _send(connection, FAILS, exercise.name, _ending(code, limits).encode())
    _send(connection, ENDS, exercise.name)


def _answer(
    connection: Connection, exercise: Exercise, names: dict[str, Any], fault: str, seed: int, limits: Limits
) -> None:
    _limit("CPU", limits.seconds, limits.seconds + 2)
    torch.set_num_threads(1)
    given: Iterator[tuple[str, Any]] = iter([(RAISES, f"it isn't defined{'; ' if fault else ''}{fault}")])
    try:
        if exercise.name in names:
            for piece in exercise.refused:
                _refuse(piece)
            given = answers(exercise.lines(names[exercise.name], seed))
    except NotImplementedError:
        given = iter([(MISSING, "")])
    except (Exception, SystemExit) as error:
        given = iter([(RAISES, told(error))])
    for answer in given:
        buffer = io.BytesIO()
        torch.save(answer, buffer)  # which `torch.load` reads without pickle, which could run code where it is read
        _send(connection, ANSWERS_WITH, exercise.name, buffer.getvalue())


def _refuse(piece: str) -> None:
    """Let a class or a function raise, whoever has imported or inherited it."""
    where, name = (piece if piece.startswith("torch.") else f"{PACKAGE}.{piece}").rsplit(".", 1)
    whole = getattr(importlib.import_module(where), name)
    about = f"{where.replace(PACKAGE, 'helpers', 1)}.{name} is what this exercise asks for: write it without"

    def refused(*_: Any, about: str, **__: Any) -> None:
        raise RuntimeError(about)

    parts = vars(whole).values() if isinstance(whole, type) else [inspect.unwrap(whole)]
    for function in [getattr(part, "__func__", part) for part in parts]:
        if isinstance(function, FunctionType) and not function.__code__.co_freevars:
            function.__code__, function.__defaults__, function.__kwdefaults__ = refused.__code__, None, {"about": about}


def _send(connection: Connection, kind: str, step: str, payload: bytes = b"") -> None:
    connection.send_bytes(f"{kind} {step}\n".encode() + payload)


def _limit(bound: str, most: float, hard: float | None = None) -> None:
    limits = math.ceil(most), math.ceil(most + 2 if hard is None else hard)
    resource.setrlimit(getattr(resource, f"RLIMIT_{bound}"), limits)


def _confine(folder: str, secret: list[str], limits: Limits) -> None:
    """A session, a folder and limits of its own, and nothing to print to."""
    os.setsid()
    end_with_parent()
    nothing = os.open(os.devnull, os.O_RDWR)
    for number in (0, 1, 2):
        os.dup2(nothing, number)
    shared = cache_folder().resolve()
    os.environ["HELPERS_CACHE"] = _own_cache(Path(folder), shared)
    os.environ |= dict.fromkeys(("HOME", "TMPDIR", "TORCHINDUCTOR_CACHE_DIR", "HELPERS_FIGURES"), folder)
    os.chdir(folder)
    Path("install.py").touch()  # a notebook's first cell finds it, and has nothing to install
    tempfile.tempdir = folder
    for loaded in [each for each in sys.modules if each.partition(".")[0] == PACKAGE]:  # as notebooks call it
        sys.modules.setdefault("helpers" + loaded.removeprefix(PACKAGE), sys.modules[loaded])
    torch.set_num_threads(1)
    _limit("DATA", system_bytes("self/status VmData") + int(limits.gib * GIB))
    _limit("FSIZE", MOST_WRITTEN)
    _limit("CORE", 0, 0)
    root = project_root()
    hidden = {path.resolve() for path in (*(root / name for name in SECRET), *map(Path, secret))}
    folders: list[str | Path] = [*SYSTEM, sys.prefix, sys.base_prefix, *site.getsitepackages(), shared]
    folders += [Path(__file__).parents[1], *(root.iterdir() if (root / "notebooks").is_dir() else [])]
    readable = [str(path) for each in folders for path in _without(Path(each), hidden)]
    landlock.restrict([folder, os.devnull, "/dev/shm"], readable, alone=True)


def _own_cache(folder: Path, shared: Path) -> str:
    """A cache that can be written to, with links to what the shared one has: pictures that are missing are drawn."""
    own = folder / ".cache"
    (own / "photos").mkdir(parents=True)
    for entry in [*shared.glob("*"), *shared.glob("photos/*")]:
        if entry.name != "photos":
            (own / entry.relative_to(shared)).symlink_to(entry)
    return str(own)


def _without(folder: Path, hidden: set[Path]) -> Iterator[Path]:
    """The folder, or where something hidden lies below it, the rest of what is in it."""
    folder = folder.resolve()
    if not any(path.is_relative_to(folder) for path in hidden):
        yield folder
    elif folder not in hidden and folder.is_dir():
        for entry in folder.iterdir():
            yield from _without(entry, hidden)
