"""Where a step's time goes.

On a GPU the account divides the time from the first to the last device event: compute, and communication, copies and
idle time while nothing computes. Idle time is divided by what the host did meanwhile. On a CPU it divides the steps:
operators, the loader, the optimizer, copies of data, and Python for the rest. At the end: spans of time as sets.
"""

import re
from bisect import bisect_left, bisect_right
from collections import Counter, defaultdict
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from math import inf
from statistics import median

import pandas as pd

from .trace import ANNOTATION, COPY, FILL, KERNEL, LOADER, OP, OPTIMIZER, RUNTIME, STEP, Event, Trace

Spans = list[tuple[float, float]]  # in order and disjoint, in µs on the profile's clock
COMPUTE, COMMUNICATION, COPIES, IDLE = "compute", "communication", "copies", "idle"
# Why the device idles: what the host does meanwhile.
IN_LOADER, IN_WAIT, IN_OP, IN_PYTHON = "loader", "wait for the device", "inside an op", "Python"
BEFORE_FIRST, START_UP, QUEUED = "before the first kernel", "start-up", "between queued kernels"
HOST_REASONS = (IN_OP, IN_PYTHON)
# A CPU's parts.
OPERATORS, PYTHON_CODE, LOADING, UPDATING, COPYING = "operators", "Python", "loader", "optimizer", "copies"

_COLLECTIVE = re.compile(
    r"nccl|cross_device_reduce|(one|two)_?shot_all_?reduce|multimem_all_|nvshmem|deep_ep|mscclpp", re.IGNORECASE
)
_WAITS = re.compile(r"(cuda|cu|hip)(Stream|Device|Event|Ctx)Synchronize(_\w+)?")
_COPY_CALLS = re.compile(r"(cuda|cu|hip)Memcpy")
_LONG = 1000.0  # µs: a launch or a call into the driver that takes longer loads code or starts the device
_SHORT = 20.0  # µs between two kernels: the device's own latency
_COPY_OPS = {"aten::copy_", "aten::_to_copy", "aten::clone", "aten::contiguous", "aten::cat", "aten::stack"}


def is_collective(event: Event) -> bool:
    return event.kind == KERNEL and names_collective(event.name)


def names_collective(kernel: str) -> bool:
    return _COLLECTIVE.search(kernel) is not None


def is_wait(call: Event) -> bool:
    """Whether a call into the runtime returns only when the device has done something."""
    return call.kind == RUNTIME and _WAITS.fullmatch(call.name) is not None


def is_blocking_read(call: Event) -> bool:
    """Whether a call copies into the host's pageable memory, and so waits for all work that was queued before."""
    return call.kind == RUNTIME and any(
        e.kind == COPY and "DtoH" in e.name and "Pageable" in e.name for e in call.children
    )


def is_copy_call(call: Event) -> bool:
    return call.kind == RUNTIME and _COPY_CALLS.match(call.name) is not None


@dataclass(frozen=True)
class Account:
    """The device's time, divided: spans of each part, and of idle time by its reason."""

    span: tuple[float, float]
    parts: dict[str, Spans]
    idle: dict[str, Spans]

    @property
    def us(self) -> float:
        return self.span[1] - self.span[0]

    @cached_property
    def shares(self) -> dict[str, float]:
        return {part: length(spans) / self.us for part, spans in self.parts.items()}

    @cached_property
    def idle_shares(self) -> dict[str, float]:
        """By reason, the largest first."""
        shares = {reason: length(spans) / self.us for reason, spans in self.idle.items()}
        return dict(sorted(((r, s) for r, s in shares.items() if s > 0), key=lambda pair: -pair[1]))

    def idle_for(self, *reasons: str) -> Spans:
        return union([span for reason in reasons for span in self.idle[reason]])


def device_account(trace: Trace) -> Account | None:
    """None without a kernel, a copy or a fill that takes time."""
    if not trace.device:
        return None
    begin, end = trace.device[0].begin, max(e.end for e in trace.device)
    if end <= begin:
        return None
    collectives = [e for e in trace.device if is_collective(e)]
    compute = of([e for e in trace.device if e.kind == KERNEL and not is_collective(e)])
    communication = subtract(of(collectives), compute)
    busy = union(compute + communication)
    copies = subtract(of([e for e in trace.device if e.kind in (COPY, FILL)]), busy)
    idle = subtract([(begin, end)], union(busy + copies))
    parts = {COMPUTE: compute, COMMUNICATION: communication, COPIES: copies, IDLE: idle}
    return Account((begin, end), parts, _reasons(trace, idle))


def _reasons(trace: Trace, idle: Spans) -> dict[str, Spans]:
    """Idle time by what the host did; of what it did at once the first in this order counts."""
    threads = _launching_threads(trace)
    host = [e for e in trace.host if e.track in threads]
    first = min((e.begin for e in trace.device if e.kind == KERNEL), default=trace.device[0].begin)
    queued = _queued(trace, idle)
    calls = [e for e in host if e.kind == RUNTIME]
    waits = [e for e in calls if is_wait(e) or (is_copy_call(e) and e.us > _LONG)]
    ranked = {
        START_UP: of(start_up_calls(trace)),
        IN_WAIT: subtract(of(waits), [span for span in queued if span[1] - span[0] < _SHORT]),
        QUEUED: queued,
        IN_LOADER: of([e for e in host if e.kind == ANNOTATION and e.name.startswith(LOADER)]),
        BEFORE_FIRST: [(idle[0][0] - 1, first)] if idle else [],
        IN_OP: of([e for e in host if e.kind in (OP, RUNTIME)]),
    }
    return _divided(idle, ranked, IN_PYTHON)


def _divided(left: Spans, ranked: dict[str, Spans], rest: str) -> dict[str, Spans]:
    """Time by part: of parts that run at once the first counts; what no part takes is the rest's."""
    parts = {}
    for part, spans in ranked.items():
        parts[part], left = intersect(left, spans), subtract(left, spans)
    return parts | {rest: left}


def _launching_threads(trace: Trace) -> set[object]:
    """The loop's thread, and those that launched at least a hundredth of the kernels, as autograd's do."""
    launched = Counter(e.parent.track for e in trace.device if e.kind == KERNEL and e.parent is not None)
    return {trace.thread} | {track for track, count in launched.items() if count >= launched.total() / 100}


def _queued(trace: Trace, idle: Spans) -> Spans:
    """Idle time that ends with work that was launched before the idle time began: the device's own latency."""
    begins = [e.begin for e in trace.device]
    queued = []
    for begin, end in idle:
        event = trace.device[min(bisect_left(begins, end), len(begins) - 1)]
        if event.parent is not None and event.parent.end <= begin:
            queued.append((begin, end))
    return queued


def start_up_calls(trace: Trace) -> list[Event]:
    """Long calls into the runtime and the driver that only a beginning needs: what recurs in most steps is left out."""
    calls = [e for e in trace.host if e.kind == RUNTIME and e.us > _LONG and not is_wait(e) and not is_copy_call(e)]
    steps: dict[str, set[int | None]] = defaultdict(set)
    for call in calls:
        steps[call.name].add(trace.step_of(call))
    often = {name for name, seen in steps.items() if len(trace.steps) > 2 and len(seen) > len(trace.steps) / 2}
    return [call for call in calls if call.name not in often]


def host_account(trace: Trace) -> dict[str, Spans]:
    """A CPU's steps, divided; the rest of the loop's thread's time is Python's."""
    steps = [(step.begin, step.end) for step in trace.steps]
    mine = [e for e in trace.host if e.track == trace.thread]
    ranked = {
        LOADING: of([e for e in mine if e.kind == ANNOTATION and e.name.startswith(LOADER)]),
        UPDATING: union([trace.update(e) for e in mine if e.kind == ANNOTATION and e.name.startswith(OPTIMIZER)]),
        COPYING: of([e for e in mine if e.kind == OP and e.name in _COPY_OPS]),
        OPERATORS: of([e for e in mine if e.kind == OP]),
    }
    return _divided(union(steps), ranked, PYTHON_CODE)


def states(trace: Trace) -> tuple[str, dict[str, Spans]]:
    """("device", when it is in which part of the account, idle time by its reason); of a CPU's trace ("loop", …)."""
    account = device_account(trace)
    if account is None:
        return "loop", host_account(trace)
    busy = {part: spans for part, spans in account.parts.items() if part != IDLE}
    return "device", busy | {f"{IDLE}: {reason}": spans for reason, spans in account.idle.items()}


def step_windows(trace: Trace) -> Spans:
    """The steps: on the device's clock where two or more can be delimited there, else on the host's.

    On the device's, from the first kernel that a step launched to the next step's first: the host may run steps ahead,
    so its steps don't delimit the device's. The last step is left out, as no next one ends it.
    """
    firsts: dict[int, float] = {}
    for event in trace.device:
        step = trace.step_of(event) if event.kind == KERNEL else None
        if step is not None:
            firsts.setdefault(step, event.begin)
    if len(firsts) > 2:
        return list(pairwise(firsts[step] for step in sorted(firsts)))
    return [(step.begin, step.end) for step in trace.steps]


def step_ms(trace: Trace) -> float:
    """The median step."""
    return median(end - begin for begin, end in step_windows(trace)) / 1e3


def timeline(trace: Trace) -> pd.DataFrame:
    """The last step as rows to draw: (track, name, begin_ms, end_ms), counted from the step's beginning.

    Tracks are "annotations" (loader, optimizer, the user's ranges), "host" and "backward thread" (outermost ops),
    and "stream N". Device work belongs to the step that launched it, so it may run after the step's end.
    """
    last = len(trace.steps) - 1
    start = trace.steps[last].begin
    events = [(track, e) for e in trace.host + trace.device if trace.step_of(e) == last and (track := _track(trace, e))]
    rows = [(track, e.name, (e.begin - start) / 1e3, (e.end - start) / 1e3) for track, e in events]
    return pd.DataFrame(rows, columns=["track", "name", "begin_ms", "end_ms"])


def _track(trace: Trace, event: Event) -> str | None:
    if event.kind == ANNOTATION:
        return "annotations" if event.track == trace.thread and not event.name.startswith(STEP) else None
    if event.kind == OP:
        if any(outer.kind == OP for outer in event.outer()):
            return None
        return "host" if event.track == trace.thread else "backward thread"
    return f"stream {str(event.track[1]).removeprefix('stream ')}" if event.kind in (KERNEL, COPY, FILL) else None


def union(events: list[tuple[float, float]]) -> Spans:
    spans: Spans = []
    for begin, end in sorted(events):
        if spans and begin <= spans[-1][1]:
            if end > spans[-1][1]:
                spans[-1] = (spans[-1][0], end)
        elif end > begin:
            spans.append((begin, end))
    return spans


def of(events: list[Event]) -> Spans:
    """The spans in which at least one of the events runs."""
    return union([(e.begin, e.end) for e in events])


def intersect(left: Spans, right: Spans) -> Spans:
    both, i, j = [], 0, 0
    while i < len(left) and j < len(right):
        begin, end = max(left[i][0], right[j][0]), min(left[i][1], right[j][1])
        if begin < end:
            both.append((begin, end))
        if left[i][1] < right[j][1]:
            i += 1
        else:
            j += 1
    return both


def subtract(left: Spans, right: Spans) -> Spans:
    edges = [-inf, *(time for span in right for time in span), inf]
    return intersect(left, list(zip(edges[::2], edges[1::2], strict=True)))


def length(spans: Spans) -> float:
    return sum(end - begin for begin, end in spans)


def covered(spans: Spans, begin: float, end: float) -> float:
    """How much of [begin, end] the spans cover."""
    first = bisect_right(spans, begin, key=lambda span: span[1])
    last = bisect_left(spans, end, key=lambda span: span[0])
    return sum(min(stop, end) - max(start, begin) for start, stop in spans[first:last])
