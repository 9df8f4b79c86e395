"""The source line of an event: the user's line that it comes from, or else the module, or the op and its shapes."""

import re
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import PurePath
from typing import Any

from ..script.stacks import CALLED_FROM
from .trace import ANNOTATION, OP, PYTHON, Event, Trace

# A Python frame as the profiler names it, and paths that are not the user's code.
_FRAME = re.compile(r"(?P<path>.+)\((?P<line>\d+)\): (?P<function>.+)", re.DOTALL)
_MODULE, BACK = "nn.Module: ", " (backward)"
_LIBRARY = re.compile(
    r"(^|/)(torch|triton|_pytest|pluggy)/|lib/python3\.\d+/(?!site-packages|dist-packages)|^<|/c[a-z2-7]{51}\.py"
)
# Libraries that a user's code calls: their lines are named only where no other is known.
_INSTALLED = re.compile(
    r"(site|dist)-packages/|^(torchvision|transformers|accelerate|lightning|pytorch_lightning|lightning_fabric|timm|peft"
    r"|diffusers|deepspeed|datasets|tokenizers|torchmetrics|torchrec|fbgemm_gpu|flash_attn|xformers|apex|numpy|PIL)/"
)


def source_line(trace: Trace, event: Event) -> str:
    """The user's line or function that an event comes from: the same text for the same line."""
    return _source(trace, event)[0]


def line_or_function(trace: Trace, event: Event) -> str:
    """ "train.py:7"; where no call tells the line, as of `a * b`, "train.py in forward", the user's function."""
    first, frame = source_line(trace, event).split(" ")[0], user_frame(event)
    if ":" in first or not (frame and (names := parsed(frame.name))):
        return PurePath(first).name
    return f"{PurePath(names[0]).name} in {names[2]}"


def user_frame(event: Event) -> Event | None:
    """The innermost call of a user's function that an event ran in; a comprehension is part of its function."""
    return next((frame for frame, *_ in user_calls(event)), None)


def user_calls(event: Event) -> Iterator[tuple[Event, str, Event]]:
    """The calls of users' functions that an event ran in, innermost first, with the line and what was called there.

    The line is as of "a.py:7 in forward", "" where no call tells it, as of `a * b`.
    """
    line, called = "", event
    for outer in event.outer():
        frame = parsed(outer.name) if outer.kind == PYTHON else None
        if frame and _is_users(frame[0]) and (frame[2] == "<module>" or not frame[2].startswith("<")):
            yield outer, line, called
        if outer.kind == PYTHON:
            called = called if frame and frame[2].startswith("<") else outer
            caller = parsed(outer.args.get(CALLED_FROM, ""))
            line = f"{caller[0]}:{caller[1]} in {caller[2]}" if caller else ""


def backward_shares(trace: Trace) -> dict[tuple[str, str], float]:
    """How the backward pass's time is shared among the user's functions whose ops it goes back through: file, name."""
    times: Any = Counter()
    for number, ran in trace.executed.items():
        maker = trace.makers.get(number)
        frame = parsed(outer.name) if maker and (outer := user_frame(maker)) else None
        times[(frame[0], frame[2]) if frame else ("", "")] += sum(event.us for event in ran)
    return {function: time / times.total() for function, time in times.items() if function[0]}


def module(event: Event) -> str | None:
    """The innermost nn.Module that an event ran in, by the name the profiler gives it ("Linear_3")."""
    return next((e.name.removeprefix(_MODULE) for e in event.outer() if e.name.startswith(_MODULE)), None)


def source_lines(trace: Trace, events: list[Event]) -> str:
    """The source line of events that share one, with the modules that they ran in."""
    text, back = _source(trace, events[0])
    names = list(dict.fromkeys(name for e in events if (name := module(_forward(trace, e)))))
    inside = f" [{', '.join(names[:3])}{', …' if len(names) > 3 else ''}]" if names else ""
    return text + inside + back


def near(first: str, second: str, lines: int = 10) -> bool:
    """Whether two places, "src/train.py:7 in main", are of lines of one file that are this near."""
    (file, line), (other, another) = (place.split(" ")[0].partition(":")[::2] for place in (first, second))
    both = line.isdigit() and another.isdigit() and PurePath(file).name == PurePath(other).name
    return both and abs(int(line) - int(another)) <= lines


def by_source_line(trace: Trace, events: list[Event]) -> dict[str, list[Event]]:
    """Events grouped by source line; groups and their events in the given order."""
    groups: dict[str, list[Event]] = {}
    for event in events:
        groups.setdefault("".join(_source(trace, event)), []).append(event)
    return groups


def others(lines: int) -> str:
    """The end of a place that stands for several lines."""
    return f", and {lines - 1} more line{'s' * (lines > 2)}" if lines > 1 else ""


def _source(trace: Trace, event: Event) -> tuple[str, str]:
    """The source line, and BACK if the event is the backward pass of that line."""
    forward = _forward(trace, event)
    back = BACK if forward is not event else ""
    lines = list(_lines(forward))
    for kind in (_is_own, _is_users):
        if text := next((text for path, text in lines if kind(path)), None):
            return text, back
    scope = forward.scope
    while scope is not None and "#" in scope.name:  # torch's own: steps, loaders, optimizers
        scope = scope.scope
    op = _op(forward)
    return (f"{scope.name}: {op}" if scope is not None else op), back


def _lines(event: Event) -> Iterator[tuple[str, str]]:
    """(path, text) of each Python line around an event, innermost first: "train.py:7 in main" where it is known."""
    for outer in (event, *event.outer()):
        if outer.kind == PYTHON:
            frame, caller = parsed(outer.name), parsed(outer.args.get(CALLED_FROM, ""))
            if frame:
                yield frame[0], f"{frame[2]} in {frame[0]}, from line {frame[1]}"
            if caller:
                yield caller[0], f"{caller[0]}:{caller[1]} in {caller[2]}"
        elif stack := outer.args.get("Call stack"):
            for frame in map(parsed, stack.split(";")):
                if frame:
                    yield frame[0], f"{frame[0]}:{frame[1]} in {frame[2]}"


def _forward(trace: Trace, event: Event) -> Event:
    """For an event of the backward pass, the op of the forward pass that it belongs to; else the event."""
    if event.backward is None:
        return event
    return trace.makers.get(event.backward.sequence, event)


def _op(event: Event) -> str:
    """The op that the event belongs to, with its shapes: "aten::mm [4×8, 8×2]"."""
    while event.kind != OP and event.parent is not None and event.parent.kind not in (ANNOTATION, PYTHON):
        event = event.parent
    shapes = ["×".join(map(str, dims)) for dims in event.dims if dims and all(isinstance(d, int) for d in dims)]
    first = ", ".join(shapes[:3] + ["…"] * (len(shapes) > 3))
    return f"{event.name} [{first}]" if shapes else event.name


def parsed(frame: str) -> tuple[str, int, str] | None:
    """Path, line and function of a Python call as the profiler names it; None of what isn't written in Python."""
    match = _FRAME.fullmatch(frame)
    return (match["path"], int(match["line"]), match["function"]) if match else None


def _is_users(path: str) -> bool:
    """Whether a path is neither torch's nor the standard library's; paths are relative to an entry of sys.path."""
    top = path.split("/")[0].removesuffix(".py")
    return not _LIBRARY.search(path) and top not in sys.stdlib_module_names


def _is_own(path: str) -> bool:
    """Whether a path isn't an installed library's either."""
    return _is_users(path) and not _INSTALLED.search(path)
