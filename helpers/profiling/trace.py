"""What a trace holds: events that took time, what ran inside what, steps, which op made which autograd node, and where
in the source an event comes from: a line, a module, or failing both the op and its shapes.
"""

import re
import sys
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

OP, ANNOTATION, PYTHON, RUNTIME = "op", "annotation", "python", "runtime"  # on the host
KERNEL, COPY, FILL = "kernel", "copy", "fill"  # on the device
ON_DEVICE = (KERNEL, COPY, FILL)

BACKWARD = "autograd::engine::evaluate_function: "
STEP, LOADER, OPTIMIZER, ZERO_GRAD = (
    "ProfilerStep#",
    "enumerate(DataLoader)#",
    "Optimizer.step#",
    "Optimizer.zero_grad#",
)
TORCHS_OWN = (STEP, LOADER, OPTIMIZER, ZERO_GRAD)

# A Python frame as the profiler names it, and what is not the user's own code.
_FRAME = re.compile(r"(?P<path>.+)\((?P<line>\d+)\): (?P<function>.+)", re.DOTALL)
_MODULE = "nn.Module: "
_LIBRARY = re.compile(r"(^|/)(torch|triton|_pytest|pluggy)/|lib/python3\.\d+/(?!site-packages|dist-packages)|^<")


@dataclass(slots=True, eq=False)
class Event:
    """Something that took time. Times are in µs; `parent` is what it ran inside, or the call that launched it."""

    name: str
    kind: str
    begin: float
    end: float
    track: tuple[Any, Any]  # process and thread on the host, device and stream on the device
    args: dict[str, Any]
    parent: "Event | None" = field(default=None, repr=False)
    children: list["Event"] = field(default_factory=list, repr=False)
    device_us: float = 0.0  # what the device did for it and for all that ran inside it
    backward: "Event | None" = field(default=None, repr=False)  # the autograd node whose backward it is part of
    scope: "Event | None" = field(default=None, repr=False)  # the innermost annotation around it

    @property
    def us(self) -> float:
        return self.end - self.begin

    @property
    def dims(self) -> list[Any]:
        """The shape of each input; () of what is no tensor, and a list of shapes of a list of tensors."""
        return self.args.get("Input Dims", [])

    @property
    def types(self) -> list[str]:
        return self.args.get("Input type", [])

    @property
    def values(self) -> list[str]:
        return self.args.get("Concrete Inputs", [])

    @property
    def shape(self) -> list[int]:
        """The shape of the first input, if it is a tensor."""
        return next((dims for dims in self.dims[:1] if all(isinstance(d, int) for d in dims)), [])

    @property
    def sequence(self) -> int | None:
        """The number of the autograd node that the op would be the next to make; none where nothing is recorded."""
        return self.args.get("Sequence number")

    def outer(self) -> Iterator["Event"]:
        """What it ran inside, innermost first."""
        event = self.parent
        while event is not None:
            yield event
            event = event.parent

    def inner(self) -> Iterator["Event"]:
        """All that ran inside it, and what that launched on the device."""
        waiting = self.children[::-1]
        while waiting:
            event = waiting.pop()
            yield event
            waiting.extend(event.children[::-1])

    def within(self, prefix: str) -> bool:
        """Whether it ran inside something of a name that begins so."""
        return any(event.name.startswith(prefix) for event in self.outer())


@dataclass(frozen=True)
class Step:
    name: str
    begin: float
    end: float


@dataclass
class Trace:
    """`host` and `device` are in the order in which they began."""

    host: list[Event]
    device: list[Event]
    about: dict[str, Any]  # what the file says besides its events
    notes: list[str]
    complete: bool = True  # whether all that was recorded was read, so that what is absent did not happen

    @cached_property
    def steps(self) -> list[Step]:
        marked = [e for e in self.host if e.kind == ANNOTATION and e.name.startswith(STEP)]
        if marked:
            return [Step(e.name, e.begin, e.end) for e in marked]
        both = self.host + self.device
        return [Step("whole trace", min(e.begin for e in both), max(e.end for e in both))]

    @cached_property
    def step_ms(self) -> float:
        """Mean length of a step on the host."""
        return sum(s.end - s.begin for s in self.steps) / len(self.steps) / 1e3

    @property
    def on_gpu(self) -> bool:
        return any(e.kind == KERNEL for e in self.device)

    @cached_property
    def thread(self) -> tuple[Any, Any] | None:
        """The thread that runs the loop: that of the steps, or the one with most ops."""
        counts: dict[Any, int] = defaultdict(int)
        for e in self.host:
            counts[e.track] += {OP: 1, ANNOTATION: 10**9 if e.name.startswith(STEP) else 1}.get(e.kind, 0)
        return max(counts, key=counts.__getitem__, default=None)

    def step_of(self, event: Event) -> int | None:
        """The number of the step that an event belongs to; device work belongs to the step that launched it.

        Where steps are marked, device work without a launch is that of steps before the first one.
        """
        if event.kind in ON_DEVICE:
            if event.parent is None and self.steps[0].name.startswith(STEP):
                return None
            event = event.parent or event
        place = bisect_right(self._step_begins, event.begin) - 1
        return place if place >= 0 and event.begin < self.steps[place].end else None

    @cached_property
    def _step_begins(self) -> list[float]:
        return [s.begin for s in self.steps]

    @cached_property
    def ops(self) -> list[Event]:
        """The ops of all steps."""
        return [e for e in self.host if e.kind == OP and self.step_of(e) is not None]

    @cached_property
    def calls(self) -> list[Event]:
        """The calls into the device's runtime and driver, of all steps."""
        return [e for e in self.host if e.kind == RUNTIME and self.step_of(e) is not None]

    @cached_property
    def annotations(self) -> list[Event]:
        return [e for e in self.host if e.kind == ANNOTATION and self.step_of(e) is not None]

    @cached_property
    def fetches(self) -> list[Event]:
        """The loop's waits for the next batch of a DataLoader."""
        return [e for e in self.annotations if e.name.startswith(LOADER) and e.track == self.thread]

    def per_step(self, total: float) -> float:
        return total / len(self.steps)

    def ms(self, events: list[Event]) -> float:
        """Milliseconds a step, on the device if there is one, of events that don't contain each other."""
        return self.per_step(sum(e.device_us if self.on_gpu else e.us for e in events)) / 1e3

    @cached_property
    def makers(self) -> dict[int, Event]:
        """Which op of the forward pass made which autograd node, by the node's number.

        The number that an op carries is that of the next node: a node is made by the last op that carries its number.
        """
        recorded = [
            e
            for e in self.host
            if e.kind == OP and e.track == self.thread and not e.backward and e.sequence is not None
        ]
        made = {}
        for event, after in zip(recorded, [*recorded, None][1:], strict=True):
            following = after.sequence if after else max(self.executed, default=-1) + 1
            for number in range(event.sequence, following):
                made[number] = event
        return made

    @cached_property
    def executed(self) -> dict[int, list[Event]]:
        """What ran in the backward pass, by the node's number."""
        ran = defaultdict(list)
        for event in self.host:
            if event.kind == OP and event.sequence is not None and event.name.startswith(BACKWARD):
                ran[event.sequence].append(event)
        return dict(ran)

    @cached_property
    def _made_by(self) -> dict[Event, list[int]]:
        numbers = defaultdict(list)
        for number, event in self.makers.items():
            numbers[event].append(number)
        return numbers

    def nodes(self, op: Event) -> list[int]:
        """The numbers of the autograd nodes that an op, or what ran inside it, made."""
        return [n for event in (op, *op.inner()) for n in self._made_by.get(event, ())]

    def both_ways(self, ops: list[Event]) -> list[Event]:
        """Ops of the forward pass, and what they cause in the backward pass."""
        return ops + [ran for op in ops for n in self.nodes(op) for ran in self.executed.get(n, ())]


def source_line(trace: Trace, event: Event) -> str:
    """The line or function of the user's that an event comes from: the same text for the same line."""
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


def source_lines(trace: Trace, events: list[Event]) -> str:
    """Where events of one line come from, with the modules that they ran in."""
    text, back = _where(trace, events[0])
    names = list(dict.fromkeys(name for e in events if (name := module(_forward(trace, e)))))
    inside = f" [{', '.join(names[:3])}{', …' if len(names) > 3 else ''}]" if names else ""
    return text + inside + back


def by_source_line(trace: Trace, events: list[Event]) -> dict[str, list[Event]]:
    """Events grouped by where they come from, each group in the order in which they began."""
    groups: dict[str, list[Event]] = {}
    for event in events:
        groups.setdefault("".join(_where(trace, event)), []).append(event)
    return groups


def frames(event: Event) -> list[tuple[str, int, str]]:
    """(path, first line, function) of the Python frames around an event, innermost first."""
    return [parsed for e in event.outer() if e.kind == PYTHON and (parsed := _parse(e.name))]


def _where(trace: Trace, event: Event) -> tuple[str, str]:
    """The line, and a remark if it is the backward pass of what stands there."""
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
