"""A trace's events: their nesting, the steps, which op made which autograd node."""

from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise
from operator import attrgetter
from typing import Any

from ..lab.arguments import has_form

OP, ANNOTATION, PYTHON, RUNTIME = "op", "annotation", "python", "runtime"  # on the host
KERNEL, COPY, FILL = "kernel", "copy", "fill"  # on the device
ON_DEVICE = (KERNEL, COPY, FILL)

BACKWARD = "autograd::engine::evaluate_function: "
STEP, LOADER = "ProfilerStep#", "enumerate(DataLoader)#"
OPTIMIZER, ZERO_GRAD = "Optimizer.step#", "Optimizer.zero_grad#"
TORCHS_OWN = (STEP, LOADER, OPTIMIZER, ZERO_GRAD)
WHOLE = "whole trace"  # the one step of a trace without marks


def aten(names: str) -> set[str]:
    """Operators of these names, with spaces between, as a trace names them."""
    return {f"aten::{name}" for name in names.split()}


NO_STACKS, NO_SHAPES = "no stacks", "no shapes"  # kinds of notes


@dataclass(frozen=True)
class Note:
    """A remark on a profile, and in a few words what it is about."""

    kind: str
    text: str


@dataclass(slots=True, eq=False)
class Event:
    """An event with a duration, in µs; `parent` is the event it ran inside, or the call that launched it."""

    name: str
    kind: str
    begin: float
    end: float
    track: tuple[Any, Any]  # process and thread on the host, device and stream on the device
    args: dict[str, Any]
    parent: "Event | None" = field(default=None, repr=False)
    children: list["Event"] = field(default_factory=list, repr=False)
    device_us: float = 0.0  # device time of what it and the events inside it launched
    backward: "Event | None" = field(default=None, repr=False)  # the autograd node whose backward it is part of
    scope: "Event | None" = field(default=None, repr=False)  # the innermost annotation around it

    @property
    def us(self) -> float:
        return self.end - self.begin

    @property
    def dims(self) -> list[Any]:
        """The shape of each input; () for what is no tensor, a list of shapes for a list of tensors."""
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
        return next((dims for dims in self.dims[:1] if has_form(dims, [int])), [])

    @property
    def sequence(self) -> int | None:
        """The number of the next autograd node when the op ran; None where no graph is recorded."""
        return self.args.get("Sequence number")

    def outer(self) -> Iterator["Event"]:
        """The events that it ran inside, innermost first."""
        event = self.parent
        while event is not None:
            yield event
            event = event.parent

    def inner(self) -> Iterator["Event"]:
        """All events that ran inside it, and what they launched on the device."""
        waiting = self.children[::-1]
        while waiting:
            event = waiting.pop()
            yield event
            waiting.extend(event.children[::-1])

    def within(self, prefix: str) -> bool:
        """Whether it ran inside an event whose name begins with the prefix."""
        return any(event.name.startswith(prefix) for event in self.outer())


@dataclass(frozen=True)
class Step:
    name: str
    begin: float
    end: float


@dataclass
class Trace:
    """Events of the host and of the device, each in the order in which they began."""

    host: list[Event]
    device: list[Event]
    about: dict[str, Any]  # what the file holds besides its events
    notes: list[Note] = field(default_factory=list)  # what the trace can't show

    @cached_property
    def steps(self) -> list[Step]:
        """From `prof.step()`'s marks; without them one for each batch of the loader or each step of the optimizer.

        The rarer of the two: one optimizer may step for many batches, several optimizers for one.
        """
        marked = [e for e in self.host if e.kind == ANNOTATION and e.name.startswith(STEP)]
        if marked:
            return [Step(e.name, e.begin, e.end) for e in marked]
        both = self.host + self.device
        first, last = min(e.begin for e in both), max(e.end for e in both)
        fetched, updated = self._marks(LOADER), self._marks(OPTIMIZER)
        if len(fetched) > 1 and (len(updated) < 2 or len(fetched) <= len(updated)):
            times = [e.begin for e in fetched] + [max([last, *(e.end for e in self.host)])]
            return [Step(f"batch {i}", *span) for i, span in enumerate(pairwise(times))]
        if len(updated) > 1:
            times = [first] + [e.end for e in updated]
            return [Step(f"update {i}", *span) for i, span in enumerate(pairwise(times))]
        return [Step(WHOLE, first, last)]

    def _marks(self, prefix: str) -> list[Event]:
        marks = [e for e in self.host if e.kind == ANNOTATION and e.name.startswith(prefix)]
        return [e for e in marks if not any(outer.name.startswith(prefix) for outer in e.outer())]

    @property
    def lost(self) -> int:
        """Device events without a launch."""
        return sum(e.parent is None for e in self.device)

    @property
    def on_gpu(self) -> bool:
        return any(e.kind == KERNEL for e in self.device)

    @cached_property
    def thread(self) -> tuple[Any, Any] | None:
        """The thread that runs the loop: that of the steps, or else the one with most ops."""
        counts: dict[Any, int] = defaultdict(int)
        for e in self.host:
            counts[e.track] += {OP: 1, ANNOTATION: 10**9 if e.name.startswith(STEP) else 1}.get(e.kind, 0)
        return max(counts, key=counts.__getitem__, default=None)

    def step_of(self, event: Event) -> int | None:
        """The number of the step that an event belongs to; device work belongs to the step that launched it.

        Where steps are marked, device work without a launch belongs to none: it was launched before the first.
        """
        if event.kind in ON_DEVICE:
            if event.parent is None and self.steps[0].name != WHOLE:
                return None
            event = event.parent or event
        index = bisect_right(self.steps, event.begin, key=attrgetter("begin")) - 1
        return index if index >= 0 and event.begin < self.steps[index].end else None

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

    def update(self, step: Event) -> tuple[float, float]:
        """When an optimizer's step updates: if it calls a closure, as Lightning has it do, after its last backward."""
        before = bisect_left(self._backward_ends, step.end)
        return max(step.begin, self._backward_ends[before - 1] if before else step.begin), step.end

    def in_update(self, event: Event) -> bool:
        return any(o.name.startswith(OPTIMIZER) and event.begin >= self.update(o)[0] for o in event.outer())

    @cached_property
    def _backward_ends(self) -> list[float]:
        return sorted(e.end for e in self.host if e.name.startswith(BACKWARD))

    @property
    def is_amd(self) -> bool:
        return any(e.kind == RUNTIME and e.name.startswith("hip") for e in self.host)

    @property
    def _gpu(self) -> dict[str, Any]:
        """The properties of the device that was recorded, where the profile holds them."""
        devices = self.about.get("deviceProperties", [])
        used = [e.track[0] for e in self.device[:1]]
        return next((p for p in devices if p.get("id") in used), devices[0] if devices else {})

    @property
    def device_name(self) -> str:
        return str(self._gpu.get("name", ""))

    @property
    def capability(self) -> tuple[int, int] | None:
        """NVIDIA's compute capability."""
        gpu = self._gpu
        return (gpu["computeMajor"], gpu["computeMinor"]) if {"computeMajor", "computeMinor"} <= gpu.keys() else None

    @cached_property
    def makers(self) -> dict[int, Event]:
        """The op of the forward pass that made each autograd node, by the node's number.

        An op carries the number of the next node, so a node is made by the last op that carries its number.
        """
        ops = (e for e in self.host if e.kind == OP and e.track == self.thread and not e.backward)
        recorded = [e for e in ops if e.sequence is not None]
        made = {}
        for event, after in zip(recorded, [*recorded, None][1:], strict=True):
            following = after.sequence if after else max(self.executed, default=-1) + 1
            for number in range(event.sequence, following):
                made[number] = event
        return made

    @cached_property
    def executed(self) -> dict[int, list[Event]]:
        """The backward events of each autograd node, by the node's number."""
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
        """The numbers of the autograd nodes that an op, or an event inside it, made."""
        return [n for event in (op, *op.inner()) for n in self._made_by.get(event, ())]

    def with_backward(self, ops: list[Event]) -> list[Event]:
        """Ops of the forward pass, and the backward events of their autograd nodes."""
        return ops + [ran for op in ops for n in self.nodes(op) for ran in self.executed.get(n, ())]
