"""How often each of the user's lines runs in one iteration, what it calls, and in which loop.

A line is a loop's if it runs many times for each time that its function is entered. Modules are counted one by one: a
model's layers one after another are no loop, and a model that is called for each token is.
"""

import sys
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from types import CodeType, FrameType
from typing import Any

from torch import nn
from torch.autograd.graph import _engine_run_backward

from .source_code import body_of
from .stacks import COMPUTING, Stack, is_library, is_part, line_of

PASSES = 16  # of a loop at least
_MODULE = nn.Module.__call__.__code__
Site = tuple[CodeType, int]  # a function of the user's, and a line in it


class Calls:
    """Those of one iteration, which counting slows."""

    def __init__(self) -> None:
        self.total = 0  # calls, of builtin functions too
        self._made: Counter[CodeType] = Counter()  # by each function of the user's
        self._entered: Counter[CodeType] = Counter()
        self.ran: Counter[Site] = Counter()
        self._modules: dict[Site, Counter[tuple[str, int]]] = defaultdict(Counter)  # that a line calls
        self._objects: dict[CodeType, set[int]] = defaultdict(set)  # whose method a function is
        self._took: Any = Counter()  # seconds until the next line, in the iteration that is slowed
        self._at: tuple[Site, float] | None = None  # the line that runs there, and since when

    @contextmanager
    def counted(self, called: Callable[[FrameType, Any], None]) -> Iterator[None]:
        """Count in this thread meanwhile, and tell of each call of a builtin function."""
        profiler, tracer = sys.getprofile(), sys.gettrace()

        def profile(frame: FrameType, event: str, function: Any) -> None:
            if event == "c_call":
                called(frame, function)
            if event in ("call", "c_call"):
                self._call(frame, event == "call")

        sys.setprofile(profile)
        sys.settrace(self._trace)
        try:
            yield
        finally:
            sys.settrace(tracer)
            sys.setprofile(profiler)

    def made(self, code: CodeType) -> int:
        """The calls of a function for each object whose method it is."""
        return self._made[code] // max(len(self._objects[code]), 1)

    def _call(self, frame: FrameType, entered: bool) -> None:
        self.total += 1
        if entered:
            code = frame.f_code
            self._entered[code] += 1
            if code.co_varnames[:1] == ("self",) and (code is _MODULE or not is_library(code.co_filename)):
                holder = frame.f_locals.get("self")
                self._objects[code].add(id(holder))
                if code is _MODULE and (site := _site(frame.f_back)):
                    self._modules[site][type(holder).__name__, id(holder)] += 1
        if site := _site(frame.f_back if entered else frame):
            self._made[site[0]] += 1

    def _trace(self, frame: FrameType, event: str, _argument: Any) -> Any:
        if event == "line" and (site := _site(frame)):
            self.ran[site] += 1
            now = time.perf_counter()
            if self._at:
                self._took[self._at[0]] += now - self._at[1]
            self._at = site, now
        return None if is_library(frame.f_code.co_filename) else self._trace

    def passes(self, site: Site) -> tuple[int, str]:
        """How often a line runs each time that its function does, for each module that it calls; and that module."""
        modules = self._modules.get(site)
        name, most = ("", 0) if not modules else (modules.most_common(1)[0][0][0], len(modules))
        return self.ran[site] // max(self._entered[site[0]], 1) // max(most, 1), name

    def loops(self, seconds: Mapping[tuple[str, Stack], float]) -> list[dict[str, Any]]:
        """The user's loops, the outermost around each line, and the seconds in them, the dearest first.

        `line` is where most of them go, `module` what it calls, `functions` those that run in the loop.
        """
        least = max(PASSES, self._entered[_engine_run_backward.__code__] + 1)  # more than there are micro-batches
        layers = {(site[0], self.ran[site]) for site, modules in self._modules.items() if len(modules) >= PASSES}
        by_loop: dict[CodeType, Any] = defaultdict(lambda: (Counter(), set()))
        for (activity, stack), taken in seconds.items():
            for depth in reversed(range(len(stack))) if activity == COMPUTING else ():
                site = stack[depth]
                if self.passes(site)[0] >= least and (site[0], self.ran[site]) not in layers:
                    lines, functions = by_loop[site[0]]
                    lines[site] += taken
                    functions |= {code for code, _ in stack[: depth + 1]}
                    break
        loops = [self._loop(lines, functions) for lines, functions in by_loop.values()]
        return sorted(loops, key=lambda loop: -loop["seconds"])

    def _loop(self, lines: Counter[Site], functions: set[CodeType]) -> dict[str, Any]:
        (code, line), _ = lines.most_common(1)[0]
        # A look comes at a call or at a loop's end: its head is charged with what the last operators of its body take.
        line = max([line, *body_of(code.co_filename, line)], key=lambda at: self._took[code, at])
        passes, module = self.passes((code, line))
        return {
            "file": code.co_filename,
            "line": line,
            "function": code.co_name,
            "passes": passes * max(self._entered[code], 1),
            "module": module,
            "seconds": lines.total(),
            "functions": sorted({(function.co_filename, function.co_name) for function in functions}),
        }


def _site(frame: FrameType | None) -> Site | None:
    """The line of the user's function that a frame is of, or of the function that its comprehension is part of."""
    while frame is not None and is_part(frame.f_code):
        frame = frame.f_back
    return (frame.f_code, line_of(frame)) if frame is not None and not is_library(frame.f_code.co_filename) else None
