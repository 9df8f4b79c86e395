"""`dlspeed COMMAND …`: a file a command, each with its options and what it calls. Alone it prints its commands.

What the user got wrong ends in one line on stderr and a non-zero exit: 2 for a wrong command, 1 for a fault. A step
that is slower or has more to do is 3, a comparison that can't tell 4. Only the file of the command that is given is
imported, and nothing that takes long before the command runs.
"""

import argparse
import contextlib
import importlib
import io
import os
import select
import signal
import sys
import threading
import time
import weakref
from _thread import start_new_thread
from collections.abc import Iterator, Sequence
from types import FrameType, ModuleType

from .shared import Parser, Wrong, fail

BEGAN = time.perf_counter()
COMMANDS = {  # and their files
    name: name.replace("try", "try_changes")
    for name in (
        "doctor", "measure", "carry", "train", "diagnose", "profile", "try", "guard", "referee", "fit", "grade",
        "course", "report",
    )
}  # fmt: skip
STOPPED = {
    "measure": "stopped; finished rows are kept, and the same command goes on there",
    "report": "stopped; nothing was written",
    "referee": "stopped; cases of a submission that were judged are kept, and the same command goes on there",
}
AGAIN_S = 0.5  # after which SIGTERM is raised anew where it was lost


def main(arguments: Sequence[str] | None = None) -> int:
    os.environ.setdefault("KINETO_LOG_LEVEL", "6")  # some builds of torch print a line when a profiler starts or stops
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # names in a file may hold half of a character
    given = list(sys.argv[1:] if arguments is None else arguments)
    command = ""
    try:
        options = parser(given[:1]).parse_args(given)
        if not (command := options.command):
            lines = [f"{name:<10}{_file(name).ABOUT}" for name in COMMANDS]
            print(*lines, "dlspeed COMMAND --help tells more", sep="\n", flush=True)
            return 0
        # While notebooks run, signals are the report's to handle.
        with contextlib.nullcontext() if command == "report" else terminable():
            code = _run(options)
            sys.stdout.flush()
            return code
    except OSError as error:
        return _unwritten(error)
    except KeyboardInterrupt as stopped:
        exec("")  # forgets that a string of code was interrupted, after which Python would end as if by SIGINT
        return fail(STOPPED.get(command, "stopped"), 128 + (*stopped.args, signal.SIGINT)[0])


def _file(command: str) -> ModuleType:
    return importlib.import_module(f".{COMMANDS[command]}", __name__)


def parser(first: Sequence[str] = ()) -> argparse.ArgumentParser:
    """Of the command that the first argument names, else of all."""
    whole = Parser(prog="dlspeed", description="Measure, train, profile, diagnose, build the report.")
    whole.set_defaults(command="")
    commands = whole.add_subparsers(title="commands", metavar="COMMAND")
    for name in [name for name in first if name in COMMANDS] or COMMANDS:
        file = _file(name)
        added = commands.add_parser(name, help=file.ABOUT, description=file.ABOUT)
        added.set_defaults(command=name)
        file.add_options(added)
    return whole


def _run(options: argparse.Namespace) -> int:
    try:
        return _file(options.command).run(options)
    except Wrong as error:
        return fail(error, 2)
    except Exception as error:
        from ..book import RecordError
        from ..chapters import UnknownName
        from ..lab.machine import DeviceError

        if isinstance(error, UnknownName):
            return fail(error, 2)
        if isinstance(error, (DeviceError, RecordError)):
            return fail(error, 1)
        raise


def _unwritten(error: OSError) -> int:
    """The code of an error of the system. Where nobody reads what is printed, nothing is said, as by other commands."""
    output = select.poll()
    output.register(1, 0)  # tells errors only
    unread = isinstance(error, BrokenPipeError) and output.poll(0)
    try:
        sys.stdout.flush()
    except OSError:
        with open(os.devnull, "wb") as nothing:
            os.dup2(nothing.fileno(), sys.stdout.fileno())  # Python tries again when it ends
    return 128 + signal.SIGPIPE if unread else fail(error, 1)


@contextlib.contextmanager
def terminable() -> Iterator[None]:
    """SIGTERM stops what runs as Ctrl-C does, which leaves no process and no temporary folder. A fork dies of it.

    The KeyboardInterrupt's argument is the signal's number. It is raised where that is safe, again every half second
    until it gets here, as a script may catch it.
    """
    owner, asked = os.getpid(), False

    def stop(_number: int, frame: FrameType | None) -> None:
        nonlocal asked
        if os.getpid() != owner:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            os.kill(os.getpid(), signal.SIGTERM)
        if not asked:
            asked = True
            start_new_thread(insist, ())  # takes no lock, unlike `threading`'s: what is interrupted may hold it
        if not _on_its_way() and not _in_destructor(frame):
            raise KeyboardInterrupt(signal.SIGTERM)

    def insist() -> None:
        while not ended.wait(AGAIN_S):
            os.kill(owner, signal.SIGTERM)

    before, ended = signal.signal(signal.SIGTERM, stop), threading.Event()
    try:
        yield
    finally:
        ended.set()
        signal.signal(signal.SIGTERM, before)


def _on_its_way() -> bool:
    """Whether an interrupt is being handled: by a `finally`, an `except` or a context that it leaves."""
    error = sys.exception()
    while error is not None and not isinstance(error, KeyboardInterrupt):
        error = error.__context__
    return error is not None


def _in_destructor(frame: FrameType | None) -> bool:
    """Whether a destructor or a callback of `weakref` runs: what they raise, Python prints and drops."""
    while frame is not None and frame.f_code.co_name != "__del__" and frame.f_code.co_filename != weakref.__file__:
        frame = frame.f_back
    return frame is not None
