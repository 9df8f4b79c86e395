"""What a thread is doing, read from its stack: the user's lines, and what a library does for the innermost one.

And the line that made each Python call of a live profile, which its export leaves out.
"""

import contextlib
import ctypes
import functools
import itertools
import linecache
import random
import re
import sys
import threading
import time
from bisect import bisect_right
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import torch

from .running import OWN_FILES, RUNPY, run_script

Line = tuple[str, int]  # file and number
Stack = tuple[tuple[CodeType, int], ...]  # the user's functions and lines, innermost first
Calling = list[tuple[CodeType, int]]  # all functions that run, and the instruction at which each is
PERIOD_S, LONGEST_S, FIRST, SHARE = 0.01, 0.05, 100, 0.005  # the first looks come fast, later ones by their share
# A thread that waits for the interpreter's lock gets it at the next operator or after this time. By Python's default,
# 5 ms, most looks would fall on operators.
SWITCH_S = 1e-5
_SET_TIMER_SLACK = 29
TRIES, FRAMES, DEEPEST = 5, 300, 40  # of a look; functions that it sees, and of the user's that count
COMPUTING, DATASET, LOADING, EVALUATING = "computing", "in the dataset", "waiting for the loader", "evaluating"
SAVING, DRAWING, LOGGING, COMPILING = "saving", "drawing", "logging", "compiling"
COMMUNICATING, BACKWARD, OPTIMIZER, RECOMPUTING = "communicating", "backward", "optimizer", "recomputing activations"
NOTING = "noting tracebacks"  # anomaly detection does, for each operation
# Of the innermost frame that one of these matches: what a library does.
_ACTIVITIES = (
    (r"/torch/utils/data/", ".*", LOADING),
    (r"/torch/serialization\.py|/safetensors/", "_?(legacy_)?save.*|serialize.*", SAVING),
    (r"/(matplotlib|plotly|seaborn|imageio)/", ".*", DRAWING),
    (r"/(logging|tqdm|rich|wandb|mlflow|loguru|tensorboardX?|torch/utils/tensorboard)/", ".*", LOGGING),
    (r"/torch/(_dynamo/convert_frame|_inductor/compile_fx)\.py", ".*", COMPILING),
    (r"/torch/distributed/distributed_c10d\.py", ".*", COMMUNICATING),
    (r"/torch/utils/checkpoint\.py", "recompute_fn|unpack_hook|backward", RECOMPUTING),
    (r"/torch/autograd/graph\.py", "_engine_run_backward", BACKWARD),
    (r"/torch/optim/", ".*", OPTIMIZER),
    (r"/python3\.\d+/(traceback|linecache)\.py", ".*", NOTING),
)
_THROUGH = (BACKWARD, RECOMPUTING)  # what the user's code does that these call is theirs; tqdm only passes on batches
_EVALUATES = re.compile(r"(^|_)(eval|evaluate|evaluation|valid|validate|validation|test)(_|$)")
_LIBRARY = re.compile(r"^<|/(site|dist)-packages/|/c[a-z2-7]{51}\.py$")  # the last is what Inductor has written
_STANDARD = f"{sys.base_prefix}/lib/python"
OURS = str(Path(__file__).resolve().parents[1]) + "/"
USER = "user"
CALLED_FROM = "Called from"  # the argument of a Python event
_STARTERS = ("bin/dlspeed", "runpy.py", "<frozen runpy>")
_INEXACT_NS = (0, 1, -1, 2, -2)  # how far an exported time may be from the profile's own, the nearest first


def looks(thread: int, ended: threading.Event) -> Iterator[tuple[float, float, Calling]]:
    """Up to a hundred times a second: when the last look was, when this one is, and what the thread runs."""
    with contextlib.suppress(OSError, AttributeError):
        # Linux wakes this thread when its wait is over, not up to 50 µs later to save power.
        ctypes.CDLL(None).prctl(_SET_TIMER_SLACK, 1)
    began, used_s = time.perf_counter(), time.thread_time()
    for looked in itertools.takewhile(lambda _: not ended.is_set(), itertools.count(1)):
        period_s = (time.thread_time() - used_s) / looked / SHARE if looked > FIRST else 0.0
        period_s = min(max(PERIOD_S, period_s), LONGEST_S)
        time.sleep(period_s * (0.5 + random.random()))  # at odd times, or a loop might be in step
        if (calling := look_at(thread)) and not ended.is_set():
            now = time.perf_counter()
            yield began, now, calling
            began = now


def look_at(thread: int) -> Calling:
    """The functions that a thread runs and the instruction at which each is, innermost first; lines come later.

    A thread that waits for the interpreter's lock, as the one that is looked at does meanwhile, asks for it after
    `SWITCH_S`. If it gets it, it goes on, at last to where it gives the lock away by itself, which a look would take
    for its place: it is looked at anew, more quickly then, as all is in the cache.
    """
    running = sys._current_frames
    for _ in range(TRIES):
        first = frame = running().get(thread)
        calling: Calling = []
        while frame is not None and len(calling) < FRAMES:
            calling.append((frame.f_code, frame.f_lasti))
            frame = frame.f_back
        if first is not None and running().get(thread) is first and calling[0][1] == first.f_lasti:
            return calling
    return []


def read_stack(calling: Calling, training: Collection[CodeType] = (), learns: bool = False) -> tuple[str, Stack]:
    """What the thread is doing, and the user's functions and lines that have it done, innermost first.

    In a loader's iterator the user's code is the dataset's; a library's frames inside the user's call are the call's.
    What the user's code does inside of a library's call, such as a generator in tqdm's, is the user's; and what starts
    processes, such as a loader, isn't logging, though that is told of each fork.
    Whatever a function does that is called `evaluate`, `validate_epoch` or `test`, it evaluates, unless it is one of
    those that are `training`, such as a `run_train_validation_loop`, or `learns`: gradients are on in training mode, as
    in PPO's `evaluate_actions`.
    """
    activity = ""
    users: list[tuple[CodeType, int]] = []
    for code, at in calling:
        if code is run_script.__code__:  # what is outside isn't the script's
            break
        kind = _kind(code)
        if kind in (USER, EVALUATING):
            if users and is_part(users[-1][0]):
                users.pop()
            if len(users) < DEEPEST:
                users.append((code, line_at(code, at)))
            activity = kind if kind == EVALUATING and not learns and code not in training else activity
        elif kind == LOADING and users and not activity:
            activity = DATASET
        elif kind and activity in ("", LOGGING) and (not users or kind in _THROUGH):
            activity = kind
    code, at = calling[0]
    return activity or COMPUTING, tuple(users) or ((code, line_at(code, at)),)


def has_ended(calling: Calling) -> bool:
    """Whether what had run the script tidies up, with whatever destructors run meanwhile."""
    codes = [code for code, _ in calling]
    inside = codes[: codes.index(run_script.__code__)] if run_script.__code__ in codes else codes
    return not inside or (
        inside is not codes and inside[-1].co_name != "<module>" and inside[-1].co_filename not in RUNPY
    )


def functions_around(frame: FrameType | None) -> Iterator[CodeType]:
    """The function that a frame is of, and those that it was called from."""
    while frame is not None:
        yield frame.f_code
        frame = frame.f_back


def line_of(frame: FrameType) -> int:
    """The line that runs; the function's first where the interpreter is between two."""
    return frame.f_lineno or frame.f_code.co_firstlineno


def line_at(code: CodeType, at: int) -> int:
    """The line of an instruction, as `line_of`."""
    begins, lines = _lines(code)
    return lines[max(bisect_right(begins, at) - 1, 0)] or code.co_firstlineno


@functools.cache
def _lines(code: CodeType) -> tuple[list[int], list[int | None]]:
    """Where each line's instructions begin."""
    begins, _, lines = zip(*code.co_lines(), strict=True)
    return list(begins), list(lines)


def is_part(code: CodeType) -> bool:
    """Whether it is a comprehension or the like, which is part of the function around it."""
    return code.co_name.startswith("<") and code.co_name != "<module>"


@functools.cache
def _kind(code: CodeType) -> str:
    """USER or EVALUATING for the user's, what a library's function does, or "" for one of no interest."""
    name = code.co_filename
    if not is_library(name):
        return EVALUATING if _EVALUATES.search(code.co_name) else USER
    for path, function, activity in _ACTIVITIES:
        if re.search(path, name) and re.fullmatch(function, code.co_name):
            return activity
    return ""


@functools.cache
def is_library(name: str) -> bool:
    """Whether a file is not the user's: installed, of Python's own, made up, or ours."""
    return is_installed(name) or name.startswith(OURS)


@functools.cache
def is_installed(name: str) -> bool:
    """Whether a file is installed, of Python's own, or made up."""
    return bool(_LIBRARY.search(name)) or name.startswith((_STANDARD, torch.__path__[0]))


def user_line(frame: FrameType | None) -> Line:
    """The user's line that a frame is of or was called from; ("", 0) if there is none."""
    while frame is not None and is_library(frame.f_code.co_filename):
        frame = frame.f_back
    return (frame.f_code.co_filename, line_of(frame)) if frame is not None else ("", 0)


def place(file: str, line: int) -> str:
    return f"{Path(file).name}:{line}"


def source(file: str, line: int) -> str:
    return " ".join(linecache.getline(file, line).split())


def quoted(file: str, line: int) -> str:
    """A line's place and its source."""
    return "  ".join(filter(None, [place(file, line), source(file, line)]))


def runners() -> Callable[[str], bool]:
    """Whether a file's frames are around a script that `watch` runs; torch cuts an entry of sys.path off its name."""
    cut = [name.removeprefix(f"{folder}/") for name in OWN_FILES for folder in sys.path if folder]
    names = {*OWN_FILES, *cut}
    return lambda path: path in names or path.endswith(_STARTERS)


def call_sites(results: Any, base_ns: int) -> Callable[[str, float], str | None]:
    """A function from a call's name and start (µs after `base_ns`) to "file(line): function"; None where unknown.

    Calls are matched by name and start. An exported time is a float of microseconds since the quarter of the year
    began, so it may be off by a nanosecond or two; no function is called twice within so little time.

    The profile doesn't own its strings. Names of code that was freed, such as a line at a prompt, may be overwritten by
    now and fail to decode.
    """
    is_runner = runners()
    sites: dict[tuple[str, int], str] = {}
    waiting: list[tuple[Any, str | None]] = [(event, None) for event in results.experimental_event_tree()]
    while waiting:
        event, site = waiting.pop()
        caller = getattr(event.extra_fields, "caller", None)
        with contextlib.suppress(UnicodeDecodeError):
            if caller is not None and not is_runner(caller.file_name):  # else the site of our frame around it
                site = f"{caller.file_name}({caller.line_number}): {caller.function_name}"
            if caller is not None and site:
                sites[event.name, event.start_time_ns - base_ns] = site
        waiting.extend((child, site) for child in event.children)

    def site_of(name: str, begin_us: float) -> str | None:
        began = round(begin_us * 1e3)
        return next((site for off in _INEXACT_NS if (site := sites.get((name, began + off)))), None)

    return site_of
