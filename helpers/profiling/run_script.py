"""Run a training script as `python SCRIPT` would, in this process, with the name `helpers` left to the script."""

import builtins
import contextlib
import importlib.machinery
import os
import runpy
import sys
import types
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

from helpers.lab.process import end_loader_workers

PACKAGE = __name__.partition(".")[0]
ASIDE = "_dlspeed"  # the name of our package while the script runs
ROOT = Path(__file__).resolve().parents[2]  # the folder of our package
OWN_FILES = {__file__, str(Path(__file__).with_name("watch.py")), str(ROOT / PACKAGE / "__main__.py")}
OWN_FILES |= {runpy.__file__, "<frozen runpy>"}


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
        with _name_left_free(), mock.patch.multiple(sys, argv=list(argv), stdout=sys.stdout, stderr=sys.stderr):
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
        if frame.tb_frame.f_code.co_filename not in OWN_FILES:
            of_script = types.TracebackType(of_script, frame.tb_frame, frame.tb_lasti, frame.tb_lineno)
    return of_script


@contextlib.contextmanager
def _name_left_free() -> Iterator[None]:
    """Our modules under the name ASIDE, so that the script can import a `helpers` of its own.

    They have to stay importable: torch.compile imports the module of a function that it traces, by its `__name__`.
    """
    ours = _modules()
    _rename(ours, PACKAGE, ASIDE)
    sys.meta_path.insert(0, _ScriptsOwn)
    try:
        yield
    finally:
        sys.meta_path.remove(_ScriptsOwn)
        for name in _modules():
            del sys.modules[name]
        _rename(ours, ASIDE, PACKAGE)


def _modules() -> dict[str, types.ModuleType]:
    return {name: module for name, module in sys.modules.items() if name.partition(".")[0] == PACKAGE}


def _rename(modules: dict[str, types.ModuleType], old: str, new: str) -> None:
    for name, module in modules.items():
        rest = name.removeprefix(PACKAGE)
        sys.modules.pop(old + rest, None)
        sys.modules[new + rest] = module
        module.__name__ = new + rest


class _ScriptsOwn:
    """Finds a script's `helpers` wherever sys.path has one, before ours, which a folder without `__init__.py` loses to.

    Nothing found: the usual search follows, which finds ours if it is installed.
    """

    @staticmethod
    def find_spec(name: str, path: Any = None, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        if name != PACKAGE:
            return None
        elsewhere = [entry for entry in sys.path if Path(entry).resolve() != ROOT]
        spec = importlib.machinery.PathFinder.find_spec(name, elsewhere)
        if spec is not None and spec.loader is None:  # else `inspect` takes its file for changed, to None
            spec.loader = importlib.machinery.NamespaceLoader(name, list(spec.submodule_search_locations), None)
        return spec
