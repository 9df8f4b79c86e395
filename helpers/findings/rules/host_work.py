"""Work of the host that the device waits for: optimizers, gradients, fallbacks in many ops, memory, launches."""

import re
from collections import defaultdict
from collections.abc import Iterator
from statistics import median
from typing import Any

import numpy as np

from ...script.stacks import CALLED_FROM
from .. import account
from ..account import Spans, covered, intersect, length, of, subtract, union
from ..scene import SEVERAL, Scene, larger, totals
from ..source_places import parsed, source_line, source_lines, user_frame
from ..summary import ESTIMATE, MEASURED, Finding, milliseconds
from ..trace import BACKWARD, KERNEL, OP, OPTIMIZER, PYTHON, STEP, WHOLE, ZERO_GRAD, Event, Trace, aten
from .needless import outermost

WITH_FUSED = {"Adam", "AdamW", "SGD", "Adagrad"}  # torch's optimizers that take fused=True
# A fused step of Adam reads weight, gradient and two moments and writes all but the gradient: 7 passes through memory
# of about 21 that its formula takes in separate ops. Of small tensors the calls are the time.
SAVED_ON_CPU, SMALL_AND_LARGE_US = (0.93, 2 / 3), (5, 50)  # of an op at a time, which takes so long
ACCUMULATES = "torch::autograd::AccumulateGrad"
LOOP = 50  # ops in a step of an unknown optimizer from which on it counts as a loop
NORMS = 16  # of a step's tensors, from which on they count as a loop
_NORMS, _SCALES = aten("linalg_vector_norm norm"), aten("mul_ div_")
OWN_OPS = 50  # of a library's function in one call, from which on it is taken for a fallback
_PACKAGE = re.compile(
    r"pip install (?:-\S+ )*[`'\"]?([\w.-]+)|github\.com/[\w-]+/([\w.-]+)|No module named [`'\"]([\w.-]+)"
    r"|[`'\"]?([\w.-]+)[`'\"]? (?:is|was) not (?:installed|found)|install [`'\"]([\w.-]+)"
)
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
            factor = 1.0
        else:
            work = (account.UPDATING, intersect(spans, scene.parts[account.UPDATING]))
            factor = _saved_on_a_cpu([op for op in ops if not op.within("aten::")])
        how = "foreach" if foreach else "one parameter after another"
        evidence = f"{calls:.0f} ops a step, {how}, {scene.time(spans)} of the host's time"
        remedy = {"case": "" if kind in WITH_FUSED else "not fused", "kind": kind}
        where = source_lines(scene.trace, group)
        yield scene.finding("unfused optimizer", work, where, evidence, ESTIMATE, factor, of_host=True, **remedy)


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
    where = _where_idle(scene, spans)
    yield scene.finding("host slower than the device", (account.IDLE, spans), where, evidence, ESTIMATE)


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
    yield scene.finding("memory returned and reserved again", work, where, evidence, ESTIMATE, case=case)


def filled_tensors(scene: Scene) -> Iterator[Finding]:
    """New tensors that deterministic mode fills, so that what reads them too early is the same in each run."""
    fills = [op for op in scene.trace.ops if op.name == "aten::fill_" and op.parent and op.parent.name in _NEW]
    if fills:
        evidence = f"{scene.each(len(fills), 'new tensor')} filled before anything is written to it"
        work, case = scene.work(fills), "filled"
        yield scene.finding("deterministic algorithms", work, scene.where(fills), evidence, MEASURED, case=case)


def norms_one_by_one(scene: Scene) -> Iterator[Finding]:
    """Norms of gradients, and their scaling, tensor by tensor. On a CPU foreach saves what is between these alone."""
    trace, recording = scene.trace, set(scene.trace.makers.values())
    flat = [op for op in outermost(trace) if not (trace.in_update(op) or op in recording)]
    loops: dict[Any, list[Event]] = defaultdict(list)
    for op in flat:
        if op.name in _NORMS:
            loops[source_line(trace, op), trace.step_of(op)].append(op)
    reads = [op.begin for op in trace.ops if op.name == "aten::item"]  # a wait on a GPU each: another finding's
    loops = {
        key: norms
        for key, norms in loops.items()
        if len(norms) >= NORMS and sum(norms[0].begin < read < norms[-1].end for read in reads) < len(norms) / 2
    }
    if not loops:
        return
    spans = [(norms[0].begin, norms[-1].end) for norms in loops.values()]
    remaining = [norm for norms in loops.values() for norm in norms]
    for (_, step), norms in loops.items():
        frame, last = user_frame(norms[0]), norms[-1].end
        scaled = [op for op in flat if op.name in _SCALES and op.begin >= last and trace.step_of(op) == step]
        scaled = [op for op in scaled if user_frame(op) is frame]
        if len(scaled) >= NORMS:
            spans.append((scaled[0].begin, scaled[-1].end))
            remaining += scaled
    count, spans = sum(map(len, loops.values())), union(spans)
    spans = spans if scene.account else subtract(spans, of(remaining))
    work = (account.IDLE, scene.idle(spans)) if scene.account else (SEVERAL, spans)
    evidence = f"{scene.each(count, 'norm')}, a call for each tensor; {scene.time(spans)} with the scaling"
    evidence += "" if scene.account else ", without what these operators compute"
    where = scene.where([norms[0] for norms in loops.values()])
    yield scene.finding("norms one by one", work, where, evidence, ESTIMATE, of_host=True)


def missing_packages(scene: Scene) -> Iterator[Finding]:
    """A library's function in Python that takes a fast one's place, as the library warned: its package is missing."""
    for file, text in scene.trace.about.get("settings", {}).get("warned", []):
        packages = dict.fromkeys(filter(None, sum(_PACKAGE.findall(text), ())))
        if not packages or not (calls := _fallback(scene.trace, file, text)):
            continue
        ops = [e for call in calls for e in call.inner() if e.kind == OP and e.parent and e.parent.kind != OP]
        work, (path, _, function) = scene.work(scene.trace.with_backward(ops)), parsed(calls[0].name)
        builtins = [e for call in calls for e in call.children if e.kind == PYTHON and not parsed(e.name)]
        lines = totals((e.args.get(CALLED_FROM, ""), e.us) for e in builtins)
        line = next((parsed(line) for line, _ in lines if line), None)
        path = path.rpartition("-packages/")[2]
        where = f"{path}:{line[1]} in {function}" if line else f"{function} in {path}"
        evidence = f"{scene.each(len(calls), 'call')} of {function}, {scene.time(work[1])} forward and backward; "
        evidence += f"the library warned: {text}"
        names = ", ".join(packages)
        yield scene.finding("missing package", work, where, evidence, ESTIMATE, of_host=True, packages=names)


def _fallback(trace: Trace, file: str, text: str) -> list[Event]:
    """The calls of the dearest function that a warning means, by its name or as one of its file in many ops."""
    words = [word for word in re.findall(r"\w+", text) if "_" in word.strip("_")]
    inside = file.rpartition("-packages/")[2]
    named: dict[str, list[Event]] = defaultdict(list)
    in_file: dict[str, list[Event]] = defaultdict(list)
    for event in trace.host:
        frame = parsed(event.name) if event.kind == PYTHON and trace.step_of(event) is not None else None
        path = frame[0].rpartition("-packages/")[2] if frame else ""
        if not frame or path.partition("/")[0] != inside.partition("/")[0]:
            continue
        if any(word in frame[2] for word in words):
            named[event.name].append(event)
        own = sum(e.kind == OP or (e.kind == PYTHON and not parsed(e.name)) for e in event.children)
        if path == inside and own >= OWN_OPS:
            in_file[event.name].append(event)
    return max((named or in_file).values(), key=lambda calls: sum(call.us for call in calls), default=[])


RULES = (filled_tensors, unfused_optimizer, zeroed_gradients)
DETAILED_RULES = (returned_memory, norms_one_by_one, missing_packages)
