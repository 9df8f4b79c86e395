"""Work of the host that the device waits for: optimizers and gradients in many ops, memory, launches."""

import re
from collections import defaultdict
from collections.abc import Iterator
from statistics import median

import numpy as np

from .. import account
from ..account import Spans, covered, intersect, length, of, subtract, union
from ..scene import Scene, larger, totals
from ..source_places import source_lines
from ..summary import BOUND, ESTIMATE, MEASURED, Finding, milliseconds
from ..trace import BACKWARD, KERNEL, OP, OPTIMIZER, PYTHON, STEP, WHOLE, ZERO_GRAD, Event, aten

WITH_FUSED = {"Adam", "AdamW", "SGD", "Adagrad"}  # torch's optimizers that take fused=True
# A fused step of Adam reads weight, gradient and two moments and writes all but the gradient: 7 passes through memory
# of about 21 that its formula takes in separate ops. Of small tensors the calls are the time.
SAVED_ON_CPU, SMALL_AND_LARGE_US = (0.93, 2 / 3), (5, 50)  # of an op at a time, which takes so long
ACCUMULATES = "torch::autograd::AccumulateGrad"
LOOP = 50  # ops in a step of an unknown optimizer from which on it counts as a loop
_NEW = aten("empty empty_strided resize_ resize_output_")
_RESERVES = re.compile(r"(cuda|hip)(Malloc|Free)(Async)?(_\w+)?|cuMem(Create|Release|Map|Unmap)")


def unfused_optimizer(scene: Scene) -> Iterator[Finding]:
    """An optimizer's step as one op for each parameter and each line of its formula, or (foreach) for each line."""
    steps: dict[str, list[Event]] = defaultdict(list)
    for event in scene.trace.annotations:
        if event.name.startswith(OPTIMIZER) and not event.within(OPTIMIZER):
            steps[event.name].append(event)
    for name, group in steps.items():
        spans = union([scene.trace.update(step) for step in group])
        inner = [e for step in group for e in step.inner() if e.begin >= scene.trace.update(step)[0]]
        ops = [e for e in inner if e.kind == OP and e.name.startswith("aten::")]
        if not ops or any(op.name.startswith(("aten::_fused_", "aten::_nnz")) for op in ops):  # sparse can't be fused
            continue
        kind = name.removeprefix(OPTIMIZER).split(".")[0]
        foreach = any(op.name.startswith("aten::_foreach_") for op in ops)
        calls = scene.per_step(sum(not any(outer.name.startswith("aten::") for outer in op.outer()) for op in ops))
        if kind not in WITH_FUSED and (foreach or "fused" in kind.lower() or calls < LOOP):
            continue
        if scene.account:
            work = larger({account.COMPUTE: scene.kernels(inner), account.IDLE: scene.idle(spans)})
            sure, factor = BOUND, 1.0
        else:
            work, sure = (account.UPDATING, intersect(spans, scene.parts[account.UPDATING])), ESTIMATE
            factor = _saved_on_a_cpu([op for op in ops if not op.within("aten::")])
        how = "foreach" if foreach else "one parameter after another"
        evidence = f"{calls:.0f} ops a step, {how}, {scene.time(spans)} of the host's time"
        remedy = {"case": "" if kind in WITH_FUSED else "not fused", "kind": kind}
        where = source_lines(scene.trace, group)
        yield scene.finding("unfused optimizer", work, where, evidence, sure, factor, of_host=True, **remedy)


def _saved_on_a_cpu(ops: list[Event]) -> float:
    """Of small tensors nearly all, as calls take the time; of large ones what fewer passes through memory save."""
    times = np.array([op.us for op in ops])
    return float(np.average(np.interp(times, SMALL_AND_LARGE_US, SAVED_ON_CPU), weights=times))


def slow_launches(scene: Scene, explained: Spans) -> Iterator[Finding]:
    """The device idles while the host runs ops and Python, but for what other findings explain."""
    trace = scene.trace
    if scene.account is None or not trace.on_gpu:
        return
    spans = subtract(scene.account.idle_for(*account.HOST_REASONS), explained)
    kernels = [e for e in trace.device if e.kind == KERNEL]
    launches = len({e.parent for e in kernels if e.parent is not None}) or len(kernels)
    waited = length(of([e for e in trace.host if account.is_wait(e)])) / scene.us
    slowed = any(e.kind == PYTHON for e in trace.host)
    evidence = (
        f"{scene.per_step(launches):,.4g} launches a step, one every {milliseconds(scene.us / launches / 1e3)}; the "
        f"median kernel runs {milliseconds(median(e.us for e in kernels) / 1e3)}; the host waits for the device "
        f"{waited:.0%} of the time{'; the profile has stacks, which slow the host' if slowed else ''}"
    )
    where, sure = _where_idle(scene, spans), ESTIMATE if slowed else BOUND
    yield scene.finding("host slower than the device", (account.IDLE, spans), where, evidence, sure)


def _where_idle(scene: Scene, spans: Spans) -> str:
    """The ranges or else the outermost ops that most of the idle time falls into."""
    events = [e for e in scene.trace.host if e.kind == OP and not any(o.kind == OP for o in e.outer())]
    times, total = totals((_scope(e), covered(spans, e.begin, e.end)) for e in events), max(length(spans), 1e-9)
    top = [f"{name} ({us / total:.0%})" for name, us in times[:3] if us > 0.02 * total]
    return ", ".join(top) or "between ops, in Python"


def _scope(event: Event) -> str:
    """The range of the user's that an op ran in, or else the op."""
    scope = event.scope
    while scope is not None and scope.name.startswith(STEP):
        scope = scope.scope
    return (scope or event).name.removeprefix(BACKWARD)


def zeroed_gradients(scene: Scene) -> Iterator[Finding]:
    """Gradients filled with zeros are written, then read and added to; dropped ones are only written."""
    trace = scene.trace
    fills = [e for e in trace.ops if e.name in ("aten::zero_", "aten::_foreach_zero_") and _in_zero_grad(e)]
    fills = [e for e in fills if not any(outer.name == "aten::_foreach_zero_" for outer in e.outer())]
    if not fills:
        return
    adds = [e for e in trace.ops if e.name == "aten::add_" and e.parent and e.parent.name == ACCUMULATES]
    tensors = sum(len(e.dims[0]) if e.name == "aten::_foreach_zero_" and e.dims else 1 for e in fills)
    work, where = scene.work(fills + adds), source_lines(trace, fills)
    evidence = f"{scene.each(tensors, 'gradient')} are filled with zeros, and added into by the backward pass"
    yield scene.finding("gradients zeroed, not dropped", work, where, evidence, MEASURED, of_host=True)


def _in_zero_grad(event: Event) -> bool:
    return any(outer.name.startswith(ZERO_GRAD) or outer.name.endswith(": zero_grad") for outer in event.outer())


def returned_memory(scene: Scene) -> Iterator[Finding]:
    """Memory that the allocator returns to the driver and requests again; each call stops the device.

    Where the loop itself calls `empty_cache`, its cost includes the requests that follow.
    """
    trace = scene.trace
    emptied = [e for e in trace.host if e.kind == PYTHON and e.name.endswith(": empty_cache")]
    emptied = [e for e in emptied if trace.step_of(e) is not None]
    starting = set(account.start_up_calls(trace))
    calls = [e for e in trace.calls if _RESERVES.fullmatch(e.name) and e not in starting]
    steady = {trace.step_of(e) for e in calls} - {0}  # the first step may reserve what all need
    again = calls if trace.steps[0].name != WHOLE and len(steady) >= max(2, len(trace.steps) / 2) else []
    if not emptied + again:
        return
    work = (account.IDLE, scene.idle(of(emptied + again))) if scene.account else scene.work(emptied)
    name = again[0].name if again else "empty_cache"
    evidence = f"{scene.per_step(len(again)):.3g} calls of {name} and its like a step"
    case, where = "emptied" if emptied else "", scene.where(emptied or again)
    yield scene.finding("memory returned and reserved again", work, where, evidence, BOUND, case=case)


def filled_tensors(scene: Scene) -> Iterator[Finding]:
    """New tensors that deterministic mode fills, so that what reads them too early is the same in each run."""
    fills = [op for op in scene.trace.ops if op.name == "aten::fill_" and op.parent and op.parent.name in _NEW]
    if fills:
        evidence = f"{scene.each(len(fills), 'new tensor')} filled before anything is written to it"
        work, case = scene.work(fills), "filled"
        yield scene.finding("deterministic algorithms", work, scene.where(fills), evidence, MEASURED, case=case)


RULES = (filled_tensors, unfused_optimizer, zeroed_gradients)
DETAILED_RULES = (returned_memory,)
