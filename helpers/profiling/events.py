"""What a trace holds: events that took time, what ran inside what, steps, and which op made which autograd node."""

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
        """The place of the step that an event belongs to; device work belongs to the step that launched it.

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
