"""Waits: of the host for the device, of both for the loader; copies and communication while nothing computes.

A wait of the host costs the idle time of the device that is still open when the wait ends: a device that was busy
throughout loses nothing.
"""

import re
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterator
from statistics import mean, median

from ...faults import remedy
from .. import account
from ..account import Spans, intersect, length, of, subtract, union
from ..scene import Scene, larger, totals
from ..source_places import by_source_line, others, source_lines
from ..summary import ESTIMATE, MEASURED, Finding, milliseconds
from ..trace import COPY, LOADER, OP, PYTHON, Event, Note, Trace
from . import convolutions

_COPY_CALLS = re.compile(r"(cuda|hip)Memcpy(_\w+)?|hipMemcpyWithStream|cuMemcpy(HtoD|DtoH)(_v2)?")
# Ops whose result has a size that depends on values, or is a Python number, so the host must wait for them.
_READS = {"aten::_local_scalar_dense", "aten::nonzero", "aten::masked_select", "aten::_unique2", "aten::unique_dim"}
_READS_IN_PYTHON = re.compile(r"<built-in method (cpu|tolist) of (Tensor|Parameter) object")
LOADER_SHARE = 0.05  # of a CPU's time: to collate takes less, and a worker would take a core from the training
RETURN_US = 20.0  # idle time before a wait returns that still belongs to it: the host learns late that work is done
SMALL_COLLECTIVE_US, MANY_COLLECTIVES = 500.0, 50

_COLLECTIVES = {
    "all-reduce": re.compile(r"all_?reduce|cross_device_reduce|multimem_all_reduce", re.IGNORECASE),
    "all-gather": re.compile(r"all_?gather", re.IGNORECASE),
    "reduce-scatter": re.compile(r"reduce_?scatter", re.IGNORECASE),
    "all-to-all": re.compile(r"all_?to_?all|sendrecv", re.IGNORECASE),
    "broadcast": re.compile(r"broadcast|bcast", re.IGNORECASE),
}


def loader_waits(scene: Scene) -> Iterator[Finding]:
    """Time in the loader: on a GPU the part in which the device is idle, on a CPU all of it."""
    fetches = scene.trace.fetches
    if not fetches:
        return
    part = account.IDLE if scene.account else account.LOADING
    spans = scene.account.idle[account.IN_LOADER] if scene.account else scene.parts[account.LOADING]
    if scene.account is None and scene.share(spans) < LOADER_SHARE:
        return
    where, name = source_lines(scene.trace, fetches), fetches[0].name.removeprefix(LOADER)
    where = where if name in where else f"{where}: {name}"
    idle = f"; the device idles in {scene.time(spans)} of them" if scene.account else ""
    evidence = f"{scene.time(of(fetches))} a step in the loader{idle}"
    case = "no workers" if any("SingleProcess" in e.name for e in fetches) else ""
    yield scene.finding("waiting for the loader", (part, spans), where, evidence, MEASURED, case=case)


def host_waits(scene: Scene) -> Iterator[Finding]:
    """The host waits until all queued work is done; then the queue is empty, and the device idles."""
    if scene.account is None:
        return
    events = waits(scene)
    if not events:
        return
    open_gaps = open_when_done(scene, events)
    groups = by_source_line(scene.trace, events)
    costs = {line: length(open_when_done(scene, group)) for line, group in groups.items()}
    worst = groups[max(costs, key=costs.__getitem__)]
    where = _where(scene.trace, worst) + others(len(groups))
    count = len({enclosing_op(e) or e for e in events})
    evidence = f"{scene.each(count, 'wait')}, {scene.time(of(events))}; when they end the device idles "
    evidence += f"for {scene.time(open_gaps)} until it gets new work"
    yield scene.finding(
        "host synchronisation", (account.IDLE, open_gaps), where, evidence, ESTIMATE, case=_case(worst[0])
    )


def waits(scene: Scene) -> list[Event]:
    """Calls that wait, but for copies from pageable memory and for the last ones, which no device work follows.

    A copy into pageable memory waits in the call that starts it, so the synchronisation after it takes no time.
    """
    trace = scene.trace
    last = max((e.begin for e in trace.device), default=0.0)
    pageable = {enclosing_op(e) for e in trace.device if is_pageable(e)} - {None}
    calls = [call for call in trace.calls if call.end < last and (account.is_wait(call) or _is_blocking_copy(call))]
    return [call for call in calls if enclosing_op(call) not in pageable and not call.within(LOADER)]


def _is_blocking_copy(call: Event) -> bool:
    return bool(_COPY_CALLS.fullmatch(call.name)) and (
        not call.name.endswith("Async") or account.is_blocking_read(call)
    )


def open_when_done(scene: Scene, calls: list[Event]) -> Spans:
    """The device's idle time from the end of each call to the next work, but for what the loader and start-up take.

    A device that was idle before the call, or the op that it belongs to, doesn't idle for it.
    """
    idle = scene.account.parts[account.IDLE]
    begins = [begin for begin, _ in idle]
    gaps = []
    for call in calls:
        i = bisect_right(begins, call.end) - 1
        since = (enclosing_op(call) or call).begin
        if i >= 0 and idle[i][1] > call.end and idle[i][0] >= since:
            gaps.append((max(idle[i][0], call.end - RETURN_US), idle[i][1]))
    return subtract(union(gaps), scene.account.idle_for(account.IN_LOADER, account.START_UP))


def on_a_gpu(scene: Scene) -> Iterator[Note]:
    """Notes on what a CPU's profile shows that would make the host wait for a GPU."""
    if scene.account is None:
        for group in by_source_line(scene.trace, reads_on_cpu(scene)).values():
            name, place = "host synchronisation", _where(scene.trace, group[:1])
            text = f"nothing on a CPU, but on a GPU the host waits at {place}; {remedy(name, _case(group[0]))}"
            yield Note(name, f"{name}: {text}")
        if deterministic := convolutions.deterministic(scene.trace):
            text = f"nothing on a CPU, but slower on a GPU: {source_lines(scene.trace, deterministic)}"
            yield Note(name := "deterministic cuDNN", f"{name}: {text}")


def reads_on_cpu(scene: Scene) -> list[Event]:
    """Reads by the loop or the model that would wait on a GPU, without those of torch's loader and optimizer."""
    trace = scene.trace
    reads = [e for e in trace.ops if e.name in _READS and not e.backward]
    reads = [e for e in reads if not any(o.name in _READS for o in e.outer())]
    methods = [e for e in trace.host if e.kind == PYTHON and _READS_IN_PYTHON.match(e.name)]
    methods = [e for e in methods if not any(inner.name in _READS for inner in e.inner())]
    reads += [e for e in methods if trace.step_of(e) is not None]
    reads = [e for e in reads if not (e.within(LOADER) or trace.in_update(e) or _is_of_torchs(e))]
    return sorted(reads, key=lambda e: e.begin)


def _is_of_torchs(event: Event) -> bool:
    """Seeds and indices that samplers and loaders draw, and ids that one_hot checks on a CPU alone."""
    calls = [outer.name for outer in event.outer() if outer.kind == PYTHON]
    return bool(event.within("aten::one_hot")) or any("torch/utils/data/" in name for name in calls)


def _case(event: Event) -> str:
    """What a wait is for."""
    names = {event.name, *(outer.name for outer in event.outer() if outer.kind == OP)}
    if "aten::_local_scalar_dense" in names or "tolist" in event.name:
        return "number"
    if names & _READS or "aten::index" in names:
        return "size"
    if "aten::copy_" in names or "emcpy" in event.name or " cpu of " in event.name:
        return "copy"
    return ""


def _reader(event: Event) -> str:
    """The name of what waits: the outermost op (aten::item), the method, or the call itself."""
    ops = [e.name for e in (event, *event.outer()) if e.kind == OP and not e.name.startswith("autograd::")]
    method = _READS_IN_PYTHON.match(event.name)
    return ops[-1] if ops else f".{method[1]}()" if method else event.name


def _where(trace: Trace, events: list[Event]) -> str:
    """The source line that the events share, and what waits there."""
    where, reader = source_lines(trace, events), _reader(events[0])
    return where if reader in where else f"{where}: {reader}"


def enclosing_op(event: Event) -> Event | None:
    return next((outer for outer in event.outer() if outer.kind == OP), None)


def is_pageable(event: Event) -> bool:
    return event.kind == COPY and "HtoD" in event.name and "Pageable" in event.name


def pageable_copies(scene: Scene) -> Iterator[Finding]:
    """The driver first copies pageable memory into pinned memory, and the host waits for both copies."""
    copies = [e for e in scene.trace.device if is_pageable(e)]
    if not copies or scene.account is None:
        return
    calls = [e.parent for e in copies if e.parent is not None]
    ops = {op for call in calls if (op := enclosing_op(call)) is not None}
    calls += [e for op in ops for e in op.inner() if account.is_wait(e)]
    mib = scene.per_step(sum(float(e.args.get("bytes", 0)) for e in copies)) / 2**20
    exposed = intersect(of(copies), scene.account.parts[account.COPIES])
    work = larger({account.COPIES: exposed, account.IDLE: open_when_done(scene, calls)})
    evidence = f"{mib:.3g} MiB in {scene.each(len(copies), 'copy')}, {scene.time(of(copies))}"
    yield scene.finding("copies from pageable memory", work, scene.where(copies), evidence, MEASURED)


def exposed_copies(scene: Scene) -> Iterator[Finding]:
    """Copies while nothing computes, but for those from pageable memory."""
    copies = [e for e in scene.trace.device if e.kind == COPY and not is_pageable(e)]
    if not copies or scene.account is None:
        return
    kind = totals((e.name.removeprefix("Memcpy "), e.us) for e in copies)[0][0]
    chosen = [e for e in copies if kind in e.name]
    case = ""
    if "DtoD" in kind:
        case = "ranks" if any(map(account.is_collective, scene.trace.device)) else "device"
    work = account.COPIES, intersect(of(copies), scene.account.parts[account.COPIES])
    evidence = f"{scene.each(len(chosen), 'copy')} {kind}, {scene.time(of(chosen))}"
    yield scene.finding("exposed copies", work, scene.where(chosen), evidence, ESTIMATE, case=case)


def collectives(scene: Scene) -> Iterator[Finding]:
    """Communication while nothing computes, by collective."""
    if scene.account is None or not (events := [e for e in scene.trace.device if account.is_collective(e)]):
        return
    exposed = scene.account.parts[account.COMMUNICATION]
    kinds: dict[str, list[Event]] = defaultdict(list)
    for event in events:
        name = f"{event.args.get('Collective name', '')} {event.name}"
        kinds[next((kind for kind, names in _COLLECTIVES.items() if names.search(name)), "other")].append(event)
    evidence = []
    ranked = sorted(kinds.items(), key=lambda pair: -length(intersect(of(pair[1]), exposed)))
    for kind, group in ranked:
        often, each = scene.per_step(len(group)), milliseconds(mean(e.us for e in group) / 1e3)
        sizes = [e.args["In msg nelems"] for e in group if "In msg nelems" in e.args]
        size = f" and {median(sizes):,.0f} elements" if sizes else ""
        evidence.append(f"{kind}: {often:,.4g} a step of {each}{size}, {scene.time(of(group))}")
    overlap = 1 - length(exposed) / length(of(events))
    first, group = ranked[0]
    evidence += [f"{overlap:.0%} overlaps with compute; the time includes waits for slower ranks"]
    work, case = (account.COMMUNICATION, exposed), _collective_case(scene, first, group)
    yield scene.finding("exposed communication", work, first, "; ".join(evidence), ESTIMATE, case=case)


def _collective_case(scene: Scene, kind: str, group: list[Event]) -> str:
    """Which remedy the dearest collectives have."""
    if not scene.trace.executed:  # no backward pass
        return "inference"
    if kind in ("all-gather", "reduce-scatter"):
        return "shards"
    small = mean(e.us for e in group) < SMALL_COLLECTIVE_US and scene.per_step(len(group)) >= MANY_COLLECTIVES
    return "small" if kind == "all-reduce" and small else kind if kind == "all-to-all" else ""


RULES = (host_waits, loader_waits, pageable_copies, exposed_copies, collectives)
