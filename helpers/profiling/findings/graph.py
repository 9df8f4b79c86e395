"""Autograd's graph where nothing needs it: evaluation that records one, and results that no backward pass reaches.

An op that records carries the number of the node it makes; a node that ran backward carries it too. So a trace shows
which nodes never ran. Only products and convolutions are looked at: they are what costs, and a metric's softmax under
grad mode is not worth a line.
"""

from bisect import bisect_right
from collections.abc import Iterator
from math import nan

from ..events import ANNOTATION, BACKWARD, OP, Event, Trace
from ..places import by_place, places
from .finding import KEPT_GRAPH, UNUSED, Finding

_HEAVY = ("aten::addmm", "aten::mm", "aten::bmm", "aten::baddbmm", "aten::convolution", "aten::_scaled_dot_product")


def kept_graph(trace: Trace) -> Iterator[Finding]:
    """A forward pass that recorded a graph of which nothing ran backward."""
    regions: dict[str, list[list[Event]]] = {}
    for stretch in _stretches(trace):
        if not _any_ran(trace, stretch):
            heavy = [op for op in stretch if _is_heavy(op)]
            if heavy:
                scope = heavy[0].scope
                named = scope is not None and "#" not in scope.name
                regions.setdefault(scope.name if named else places(trace, heavy[:1]), []).append(stretch)
    for where, stretches in regions.items():
        yield Finding(
            KEPT_GRAPH,
            where,
            trace.per_step(sum(map(len, stretches))),
            nan,
            "memory rather than time: activations are kept that nothing reads; count is of ops that recorded",
            "wrap it in torch.no_grad() or torch.inference_mode()",
        )


def unused_results(trace: Trace) -> Iterator[Finding]:
    """A product in a pass that did run backward, though not through it: nothing of the loss depends on its result."""
    unused = [
        op
        for stretch in _stretches(trace)
        if _any_ran(trace, stretch)
        for op in stretch
        if _is_heavy(op) and not any(number in trace.executed for number in trace.nodes(op))
    ]
    for group in by_place(trace, unused).values():
        yield Finding(
            UNUSED,
            places(trace, group),
            trace.per_step(len(group)),
            trace.ms(group),
            "measured: the forward products whose backward never ran",
            "remove it: the loss doesn't depend on it; if it is wanted all the same, compute it under torch.no_grad()",
        )


def _stretches(trace: Trace) -> list[list[Event]]:
    """The ops that made nodes, cut where a step, a backward pass or an annotation (loader, …) begins or ends."""
    recorded = list(dict.fromkeys(trace.makers.values()))
    cuts = sorted(
        time
        for e in trace.host
        if e.track == trace.thread and (e.kind == ANNOTATION or e.name.startswith(BACKWARD))
        for time in (e.begin, e.end)
    )
    # On a GPU the backward pass runs in a thread of its own while this one waits.
    cuts = sorted(cuts + [e.begin for e in trace.host if e.name.startswith(BACKWARD) and e.track != trace.thread])
    stretches: dict[int, list[Event]] = {}
    for op in recorded:
        if op.kind == OP and trace.step_of(op) is not None:
            stretches.setdefault(bisect_right(cuts, op.begin), []).append(op)
    return list(stretches.values())


def _any_ran(trace: Trace, stretch: list[Event]) -> bool:
    return any(number in trace.executed for op in stretch for number in trace.nodes(op))


def _is_heavy(op: Event) -> bool:
    return op.name.startswith(_HEAVY)
