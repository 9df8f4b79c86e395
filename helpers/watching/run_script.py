"""Run a training script as `python SCRIPT` would, in this process."""

import builtins
import os
import runpy
import sys
import types
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest import mock

from ..lab.process import end_loader_workers

PACKAGE = Path(__file__).resolve().parents[1]
# Whose frames are around a script that runs
OWN_FILES = {str(PACKAGE / name) for name in ("__main__.py", "boot.py", "commands.py", "own_loop.py")}
OWN_FILES |= set(map(str, Path(__file__).parent.glob("*.py")))
RUNPY = (runpy.__file__, "<frozen runpy>")


class Stop(BaseException):
    """Ends the script inside its last recorded step; not an Exception, which scripts catch."""


def run_script(program: types.CodeType | str, argv: Sequence[str]) -> Any:
    """Run a file's code as `python FILE` does, or a module as `python -m MODULE`; returns what it passed to sys.exit.

    Processes that it spawns import it from `sys.modules["__main__"]`.
    """
    home = Path.cwd() if isinstance(program, str) else Path(program.co_filename).resolve().parent
    path, main, folder = list(sys.path), sys.modules["__main__"], Path.cwd()
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
        pass
    except SystemExit as end:
        return end.code
    finally:
        sys.path[:], sys.modules["__main__"] = path, main
        os.chdir(folder)
        end_loader_workers()
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
