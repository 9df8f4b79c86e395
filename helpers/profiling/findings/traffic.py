"""Copies and communication while nothing computes."""

import re
from collections import defaultdict
from collections.abc import Iterator
from statistics import mean, median

from ..account import COMMUNICATION, COPIES, IDLE, is_collective, is_wait
from ..diagnosis import BOUND, MEASURED, Finding, milliseconds
from ..intervals import intersect, length, of
from ..scene import Scene, larger, totals
from ..trace import COPY, Event
from .waiting import enclosing_op, is_pageable, open_when_done

SMALL_COLLECTIVE_US, MANY_COLLECTIVES = 500.0, 50

_KINDS = {
    "all-reduce": re.compile(r"all_?reduce|cross_device_reduce|multimem_all_reduce", re.IGNORECASE),
    "all-gather": re.compile(r"all_?gather", re.IGNORECASE),
    "reduce-scatter": re.compile(r"reduce_?scatter", re.IGNORECASE),
    "all-to-all": re.compile(r"all_?to_?all|sendrecv", re.IGNORECASE),
    "broadcast": re.compile(r"broadcast|bcast", re.IGNORECASE),
}


def pageable_copies(scene: Scene) -> Iterator[Finding]:
    """The driver first copies pageable memory into pinned memory, and the host waits for both copies."""
    copies = [e for e in scene.trace.device if is_pageable(e)]
    if not copies or scene.account is None:
        return
    calls = [e.parent for e in copies if e.parent is not None]
    ops = {op for call in calls if (op := enclosing_op(call)) is not None}
    calls += [e for op in ops for e in op.inner() if is_wait(e)]
    mib = scene.per_step(sum(float(e.args.get("bytes", 0)) for e in copies)) / 2**20
    exposed = intersect(of(copies), scene.account.parts[COPIES])
    work = larger({COPIES: exposed, IDLE: open_when_done(scene, calls)})
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
        case = "ranks" if any(map(is_collective, scene.trace.device)) else "device"
    work = COPIES, intersect(of(copies), scene.account.parts[COPIES])
    evidence = f"{scene.each(len(chosen), 'copy')} {kind}, {scene.time(of(chosen))}"
    yield scene.finding("exposed copies", work, scene.where(chosen), evidence, BOUND, case=case)


def collectives(scene: Scene) -> Iterator[Finding]:
    """Communication while nothing computes, by collective."""
    if scene.account is None or not (events := [e for e in scene.trace.device if is_collective(e)]):
        return
    exposed = scene.account.parts[COMMUNICATION]
    kinds: dict[str, list[Event]] = defaultdict(list)
    for event in events:
        name = f"{event.args.get('Collective name', '')} {event.name}"
        kinds[next((kind for kind, names in _KINDS.items() if names.search(name)), "other")].append(event)
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
    work, case = (COMMUNICATION, exposed), _case(scene, first, group)
    yield scene.finding("exposed communication", work, first, "; ".join(evidence), BOUND, case=case)


def _case(scene: Scene, kind: str, group: list[Event]) -> str:
    """Which remedy the dearest collectives have."""
    if not scene.trace.executed:  # no backward pass
        return "inference"
    if kind in ("all-gather", "reduce-scatter"):
        return "shards"
    small = mean(e.us for e in group) < SMALL_COLLECTIVE_US and scene.per_step(len(group)) >= MANY_COLLECTIVES
    return "small" if kind == "all-reduce" and small else kind if kind == "all-to-all" else ""
