"""Where in the source an event of a trace comes from: a line, a module, or failing both the op and its shapes."""

import re
import sys
from typing import Any

from .events import ANNOTATION, OP, PYTHON, Event, Trace

_FRAME = re.compile(r"(?P<path>.+)\((?P<line>\d+)\): (?P<function>.+)", re.DOTALL)
_MODULE = "nn.Module: "
_LIBRARY = re.compile(r"(^|/)(torch|triton|_pytest|pluggy)/|lib/python3\.\d+/(?!site-packages|dist-packages)|^<")


def place(trace: Trace, event: Event) -> str:
    """The line or function of the user's that an event comes from: the same text for the same place."""
    return _where(trace, event)[0]


def user_frame(event: Event) -> Event | None:
    """The innermost call of a function of the user's that an event ran in; a comprehension is part of its function."""
    for outer in event.outer():
        own = _parse(outer.name) if outer.kind == PYTHON else None
        if own and _is_users(own[0]) and (own[2] == "<module>" or not own[2].startswith("<")):
            return outer
    return None


def module(event: Event) -> str | None:
    """The innermost nn.Module that an event ran in, by the name the profiler gives it ("Linear_3")."""
    return next((e.name.removeprefix(_MODULE) for e in event.outer() if e.name.startswith(_MODULE)), None)


def places(trace: Trace, events: list[Event]) -> str:
    """Where events of one place come from, with the modules that they ran in."""
    text, back = _where(trace, events[0])
    names = list(dict.fromkeys(name for e in events if (name := module(_forward(trace, e)))))
    inside = f" [{', '.join(names[:3])}{', …' if len(names) > 3 else ''}]" if names else ""
    return text + inside + back


def by_place(trace: Trace, events: list[Event]) -> dict[str, list[Event]]:
    """Events grouped by where they come from, each group in the order in which they began."""
    groups: dict[str, list[Event]] = {}
    for event in events:
        groups.setdefault("".join(_where(trace, event)), []).append(event)
    return groups


def frames(event: Event) -> list[tuple[str, int, str]]:
    """(path, first line, function) of the Python frames around an event, innermost first."""
    return [parsed for e in event.outer() if e.kind == PYTHON and (parsed := _parse(e.name))]


def _where(trace: Trace, event: Event) -> tuple[str, str]:
    """The place, and a remark if it is the backward pass of what stands there."""
    source = _forward(trace, event)
    back = " (backward)" if source is not event else ""
    for outer in (source, *source.outer()):
        if outer.kind != PYTHON:
            continue
        own, called = _parse(outer.name), _parse(outer.args.get("Called from", ""))
        if own and _is_users(own[0]):
            return f"{own[2]} in {own[0]}, from line {own[1]}", back
        if called and _is_users(called[0]):
            return f"{called[0]}:{called[1]} in {called[2]}", back
    scope = source.scope
    while scope is not None and "#" in scope.name:  # torch's own: steps, loaders, optimizers
        scope = scope.scope
    named = _op(source)
    return (f"{scope.name}: {named}" if scope is not None else named), back


def _forward(trace: Trace, event: Event) -> Event:
    """For what ran in the backward pass, the op of the forward pass that it belongs to."""
    if event.backward is None:
        return event
    return trace.makers.get(event.backward.sequence, event)


def _op(event: Event) -> str:
    while event.kind != OP and event.parent is not None and event.parent.kind not in (ANNOTATION, PYTHON):
        event = event.parent
    shapes = ", ".join("×".join(map(str, dims)) for dims in event.dims if _is_shape(dims))
    return f"{event.name} [{shapes}]" if shapes else event.name


def _is_shape(dims: Any) -> bool:
    return isinstance(dims, list) and bool(dims) and all(isinstance(d, int) for d in dims)


def _parse(frame: str) -> tuple[str, int, str] | None:
    found = _FRAME.fullmatch(frame)
    return (found["path"], int(found["line"]), found["function"]) if found else None


def _is_users(path: str) -> bool:
    """Neither torch's nor the standard library's; paths are recorded from the folder that sys.path names."""
    top = path.split("/")[0].removesuffix(".py")
    return not _LIBRARY.search(path) and top not in sys.stdlib_module_names
