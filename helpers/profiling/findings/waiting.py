"""Waits: of the device for the host, of the host for the device, of both for the loader, for copies, for other ranks.

A wait of the host costs the idle time of the device that is still open when the wait ends: a device that was busy
throughout loses nothing.
"""

import re
from bisect import bisect_left, bisect_right
from collections import Counter, defaultdict
from collections.abc import Iterator
from statistics import mean, median

from ..account import (
    COMMUNICATION,
    COPIES,
    HOST_REASONS,
    IDLE,
    IN_LOADER,
    LOADING,
    START_UP,
    UPDATING,
    Spans,
    intersect,
    is_blocking_read,
    is_collective,
    is_wait,
    length,
    of,
    start_up_calls,
    subtract,
    union,
)
from ..diagnosis import BOUND, ESTIMATE, MEASURED
from ..places import by_source_line, frames, source_lines
from ..trace import COPY, KERNEL, LOADER, OP, OPTIMIZER, PYTHON, RUNTIME, WHOLE, ZERO_GRAD, Event
from . import (
    COLLECTIVES,
    COPYING,
    DETERMINISTIC,
    HOST_WAITS,
    LAUNCHES,
    LOADER_WAITS,
    PAGEABLE,
    RETURNED,
    UNFUSED,
    ZEROED,
    Finding,
    Scene,
    others,
    products,
)

_COPY_CALLS = re.compile(r"(cuda|hip)Memcpy(_\w+)?|hipMemcpyWithStream|cuMemcpy(HtoD|DtoH)(_v2)?")
# Ops whose result has a size that depends on values, or is a Python number, so the host must wait for them.
_READS = {"aten::_local_scalar_dense", "aten::nonzero", "aten::masked_select", "aten::_unique2", "aten::unique_dim"}
_READS_IN_PYTHON = re.compile(r"<built-in method (cpu|tolist) of (Tensor|Parameter) object")

_ADVICE = {
    "aten::_local_scalar_dense": "add it up on the device and read it every n-th step, after the backward pass",
    "aten::nonzero": "use torch.where or multiply by the mask: the host waits to learn the size of what a mask selects",
    "copy": "copy with non_blocking=True from pinned memory, and read what comes back a step later",
    "wait": "remove the synchronisation; to time the device use CUDA events, and read them at the end",
}
WITH_FUSED = {"Adam", "AdamW", "SGD", "Adagrad"}  # torch's optimizers that take fused=True
LOADER_SHARE = 0.05  # of a CPU's time: to collate takes less, and a worker would take a core from the training
LOOP = 50  # ops in a step of an unknown optimizer from which on it counts as a loop
RETURN_US = 20.0  # idle time before a wait returns that still belongs to it: the host learns late that work is done
SMALL_COLLECTIVE_US, MANY_COLLECTIVES = 500.0, 50

_RESERVES = re.compile(r"(cuda|hip)(Malloc|Free)(Async)?(_\w+)?|cuMem(Create|Release|Map|Unmap)")


def loader_waits(scene: Scene) -> Iterator[Finding]:
    """Time in the loader: on a GPU the part in which the device is idle, on a CPU all of it."""
    fetches = scene.trace.fetches
    if not fetches:
        return
    part = IDLE if scene.account else LOADING
    spans = scene.account.idle[IN_LOADER] if scene.account else scene.parts[LOADING]
    if scene.account is None and scene.share(spans) < LOADER_SHARE:
        return
    single = any("SingleProcess" in e.name for e in fetches)
    where, name = source_lines(scene.trace, fetches), fetches[0].name.removeprefix(LOADER)
    idle = f"; the device idles in {scene.ms(spans):.3g} ms of them" if scene.account else ""
    yield scene.finding(
        LOADER_WAITS,
        part,
        spans,
        where if name in where else f"{where}: {name}",
        f"{scene.ms(of(fetches)):.3g} ms a step in the loader{idle}",
        "give the DataLoader num_workers, persistent_workers and pin_memory; do once what doesn't change by epoch"
        if single
        else "more workers or a larger prefetch_factor; do less for each sample, and once what doesn't change by epoch",
        MEASURED,
    )


def host_waits(scene: Scene) -> Iterator[Finding]:
    """The host waits until all queued work is done; then the queue is empty, and the device idles."""
    if scene.account is None:
        return
    events = waits(scene)
    if not events:
        return
    open_gaps = _open_when_done(scene, events)
    groups = by_source_line(scene.trace, events)
    costs = {line: length(_open_when_done(scene, group)) for line, group in groups.items()}
    worst = groups[max(costs, key=costs.__getitem__)]
    reader, where = _reader(worst[0]), source_lines(scene.trace, worst)
    count = len({_enclosing_op(e) or e for e in events})
    yield scene.finding(
        HOST_WAITS,
        IDLE,
        open_gaps,
        (where if reader in where else f"{where}: {reader}") + others(len(groups)),
        f"{scene.per_step(count):.3g} waits a step, {scene.ms(of(events)):.3g} ms; when they end the device idles "
        f"for {scene.ms(open_gaps):.3g} ms until it gets new work",
        _ADVICE[_kind(worst[0])],
        BOUND,
    )


def waits(scene: Scene) -> list[Event]:
    """Calls that wait, but for copies from pageable memory and for the last ones, which no device work follows.

    A copy into pageable memory waits in the call that starts it, so the synchronisation after it takes no time.
    """
    trace = scene.trace
    last = max((e.begin for e in trace.device), default=0.0)
    pageable = {_copying_op(e) for e in trace.device if _is_pageable(e)}
    return [
        call
        for call in trace.calls
        if (is_wait(call) or (_COPY_CALLS.fullmatch(call.name) and _is_blocking(call)))
        and call.end < last
        and _enclosing_op(call) not in pageable
        and not call.within(LOADER)
    ]


def _is_blocking(call: Event) -> bool:
    return not call.name.endswith("Async") or is_blocking_read(call)


def _open_when_done(scene: Scene, calls: list[Event]) -> Spans:
    """The device's idle time from the end of each call to the next work, but for what the loader and start-up take.

    A device that was idle before the call, or the op that it belongs to, doesn't idle for it.
    """
    idle = scene.account.parts[IDLE]
    begins = [begin for begin, _ in idle]
    found = []
    for call in calls:
        i = bisect_right(begins, call.end) - 1
        since = (_enclosing_op(call) or call).begin
        if i >= 0 and idle[i][1] > call.end and idle[i][0] >= since:
            found.append((max(idle[i][0], call.end - RETURN_US), idle[i][1]))
    other = union(scene.account.idle[IN_LOADER] + scene.account.idle[START_UP])
    return subtract(union(found), other)


def on_a_gpu(scene: Scene) -> Iterator[str]:
    """Notes on what a CPU's profile shows that would make the host wait for a GPU."""
    if scene.account is None:
        for group in by_source_line(scene.trace, reads_on_cpu(scene)).values():
            where, reader = source_lines(scene.trace, group[:1]), _reader(group[0])
            place = where if reader in where else f"{where}: {reader}"
            yield f"{HOST_WAITS}: nothing on a CPU, but on a GPU the host waits at {place}; {_ADVICE[_kind(group[0])]}"
        if found := products.deterministic(scene.trace):
            yield f"{DETERMINISTIC}: nothing on a CPU, but slower on a GPU: {source_lines(scene.trace, found)}"


def reads_on_cpu(scene: Scene) -> list[Event]:
    """Reads by the loop or the model that would wait on a GPU, without those of torch's loader and optimizer."""
    trace = scene.trace
    reads = [e for e in trace.ops if e.name in _READS and not e.backward]
    reads = [e for e in reads if not any(o.name in _READS for o in e.outer())]
    methods = [
        e for e in trace.host if e.kind == PYTHON and _READS_IN_PYTHON.match(e.name) and trace.step_of(e) is not None
    ]
    reads += [e for e in methods if not any(inner.name in _READS for inner in e.inner())]
    return sorted(
        (e for e in reads if not e.within(LOADER) and not e.within(OPTIMIZER) and not _is_torchs_bookkeeping(e)),
        key=lambda e: e.begin,
    )


def _is_torchs_bookkeeping(event: Event) -> bool:
    """Seeds and indices that samplers and loaders draw, wherever the loop makes them."""
    return any("torch/utils/data/" in path for path, _, _ in frames(event))


def _kind(event: Event) -> str:
    names = {event.name, *(outer.name for outer in event.outer() if outer.kind == OP)}
    if "aten::_local_scalar_dense" in names or "tolist" in event.name:
        return "aten::_local_scalar_dense"
    if names & _READS or "aten::index" in names:
        return "aten::nonzero"
    if "aten::copy_" in names or "emcpy" in event.name or " cpu of " in event.name:
        return "copy"
    return "wait"


def _reader(event: Event) -> str:
    """The name of what waits: the outermost op (aten::item), the method, or the call itself."""
    ops = [e.name for e in (event, *event.outer()) if e.kind == OP and not e.name.startswith("autograd::")]
    method = _READS_IN_PYTHON.match(event.name)
    return ops[-1] if ops else f".{method[1]}()" if method else event.name


def pageable_copies(scene: Scene) -> Iterator[Finding]:
    """The driver first copies pageable memory into pinned memory, and the host waits for both copies."""
    copies = [e for e in scene.trace.device if _is_pageable(e)]
    if not copies or scene.account is None:
        return
    calls = [e.parent for e in copies if e.parent is not None]
    ops = {op for call in calls if (op := _enclosing_op(call)) is not None}
    calls += [e for op in ops for e in op.inner() if is_wait(e)]
    part, spans = scene.larger(
        {COPIES: intersect(of(copies), scene.account.parts[COPIES]), IDLE: _open_when_done(scene, calls)}
    )
    mib = scene.per_step(sum(float(e.args.get("bytes", 0)) for e in copies)) / 2**20
    yield scene.finding(
        PAGEABLE,
        part,
        spans,
        scene.where(copies),
        f"{mib:.3g} MiB a step in {scene.per_step(len(copies)):.3g} copies, {scene.ms(of(copies)):.3g} ms",
        "pin_memory=True in the DataLoader, then .to(device, non_blocking=True); build constants on the device",
        MEASURED,
    )


def exposed_copies(scene: Scene) -> Iterator[Finding]:
    """Copies while nothing computes, but for those from pageable memory."""
    copies = [e for e in scene.trace.device if e.kind == COPY and not _is_pageable(e)]
    if not copies or scene.account is None:
        return
    spans = intersect(of(copies), scene.account.parts[COPIES])
    kinds = Counter()
    for event in copies:
        kinds[event.name.removeprefix("Memcpy ")] += event.us
    kind = kinds.most_common(1)[0][0]
    chosen = [e for e in copies if kind in e.name]
    advice = "copy while the device computes: prefetch the next batch on a stream of its own, from pinned memory"
    if "DtoD" in kind:
        advice = "avoid copies within the device: views instead of cat and clone"
        if any(map(is_collective, scene.trace.device)):
            advice += "; DistributedDataParallel(gradient_as_bucket_view=True)"
    yield scene.finding(
        COPYING,
        COPIES,
        spans,
        scene.where(chosen),
        f"{scene.per_step(len(chosen)):.4g} copies a step {kind}, {scene.ms(of(chosen)):.3g} ms",
        advice,
        BOUND,
    )


def _is_pageable(event: Event) -> bool:
    return event.kind == COPY and "HtoD" in event.name and "Pageable" in event.name


def _enclosing_op(event: Event) -> Event | None:
    return next((outer for outer in event.outer() if outer.kind == OP), None)


def _copying_op(event: Event) -> Event:
    """The op that a copy belongs to, or else the call."""
    return _enclosing_op(event) or event.parent or event


_KINDS = {
    "all-reduce": re.compile(r"all_?reduce|cross_device_reduce|multimem_all_reduce", re.IGNORECASE),
    "all-gather": re.compile(r"all_?gather", re.IGNORECASE),
    "reduce-scatter": re.compile(r"reduce_?scatter", re.IGNORECASE),
    "all-to-all": re.compile(r"all_?to_?all|sendrecv", re.IGNORECASE),
    "broadcast": re.compile(r"broadcast|bcast", re.IGNORECASE),
}


def collectives(scene: Scene) -> Iterator[Finding]:
    """Communication while nothing computes, by collective."""
    if scene.account is None or not (events := [e for e in scene.trace.device if is_collective(e)]):
        return
    exposed = scene.account.parts[COMMUNICATION]
    kinds: dict[str, list[Event]] = defaultdict(list)
    for event in events:
        name = f"{event.args.get('Collective name', '')} {event.name}"
        kinds[next((kind for kind, names in _KINDS.items() if names.search(name)), "other")].append(event)
    told = []
    for kind, group in sorted(kinds.items(), key=lambda pair: -length(intersect(of(pair[1]), exposed))):
        often, each = scene.per_step(len(group)), mean(e.us for e in group)
        told.append(f"{kind}: {often:.4g} a step of {each:.4g} µs{_size(group)}, {scene.ms(of(group)):.3g} ms")
    overlap = 1 - length(exposed) / length(of(events))
    first = max(kinds, key=lambda kind: length(intersect(of(kinds[kind]), exposed)))
    yield scene.finding(
        COLLECTIVES,
        COMMUNICATION,
        exposed,
        first,
        f"{'; '.join(told)}; {overlap:.0%} overlaps with compute; the time includes waits for slower ranks",
        _remedy(scene, first, kinds[first]),
        BOUND,
    )


def _size(group: list[Event]) -> str:
    sizes = [e.args["In msg nelems"] for e in group if "In msg nelems" in e.args]
    return f" and {median(sizes):,.0f} elements" if sizes else ""


def _remedy(scene: Scene, kind: str, group: list[Event]) -> str:
    small = mean(e.us for e in group) < SMALL_COLLECTIVE_US
    if kind == "all-reduce" and small and scene.per_step(len(group)) >= MANY_COLLECTIVES:
        return "gradients are reduced one by one: let DistributedDataParallel put them into buckets (bucket_cap_mb)"
    if kind in ("all-gather", "reduce-scatter"):
        return "prefetch the next layer's shard while this one computes; shard within a node; larger batches"
    if kind == "all-to-all":
        return "start it before work that doesn't need it; balance what each rank sends; send 16-bit values"
    return "reduce during the backward pass (DistributedDataParallel), in 16 bits (bf16_compress_hook); larger batches"


def unfused_optimizer(scene: Scene) -> Iterator[Finding]:
    """An optimizer's step as one op for each parameter and each line of its formula, or (foreach) for each line."""
    steps: dict[str, list[Event]] = defaultdict(list)
    for event in scene.trace.annotations:
        if event.name.startswith(OPTIMIZER) and not event.within(OPTIMIZER):
            steps[event.name].append(event)
    for name, group in steps.items():
        ops = [e for step in group for e in step.inner() if e.kind == OP and e.name.startswith("aten::")]
        if not ops or any(op.name.startswith("aten::_fused_") for op in ops):
            continue
        kind = name.removeprefix(OPTIMIZER).split(".")[0]
        foreach = any(op.name.startswith("aten::_foreach_") for op in ops)
        calls = scene.per_step(sum(not any(outer.name.startswith("aten::") for outer in op.outer()) for op in ops))
        if kind not in WITH_FUSED and (foreach or "fused" in kind.lower() or calls < LOOP):
            continue
        if scene.account:
            part, spans = scene.larger({"compute": scene.kernels(group), IDLE: scene.idle(of(group))})
        else:
            part, spans = UPDATING, intersect(of(group), scene.parts[UPDATING])
        yield scene.finding(
            UNFUSED,
            part,
            spans,
            source_lines(scene.trace, group),
            f"{calls:.0f} ops a step, {'foreach' if foreach else 'one parameter after another'}, "
            f"{scene.ms(of(group)):.3g} ms of the host's time",
            f"{kind}(…, fused=True)"
            if kind in WITH_FUSED
            else f"{kind}(…, foreach=True), or an optimizer with fused=True",
            BOUND,
        )


def slow_launches(scene: Scene, explained: Spans) -> Iterator[Finding]:
    """The device idles while the host runs ops and Python, but for what other findings explain."""
    if scene.account is None or not scene.trace.on_gpu:
        return
    account, trace = scene.account, scene.trace
    spans = subtract(union([span for reason in HOST_REASONS for span in account.idle[reason]]), explained)
    kernels = [e for e in trace.device if e.kind == KERNEL]
    launches = len({e.parent for e in kernels if e.parent is not None}) or len(kernels)
    waited = length(of([e for e in trace.host if is_wait(e)])) / scene.us
    slowed = any(e.kind == PYTHON for e in trace.host)
    yield scene.finding(
        LAUNCHES,
        IDLE,
        spans,
        _where_idle(scene, spans),
        f"{scene.per_step(launches):.4g} launches a step, one every {scene.us / launches:.3g} µs; the median kernel "
        f"runs {median(e.us for e in kernels):.3g} µs; the host waits for the device {waited:.0%} of the time"
        + ("; the profile has stacks, which slow the host" if slowed else ""),
        "torch.compile (mode='reduce-overhead' records CUDA graphs); larger batches; fewer, fused ops",
        ESTIMATE if slowed else BOUND,
    )


def _where_idle(scene: Scene, spans: Spans) -> str:
    """The ranges or else the outermost ops that most of the idle time falls into."""
    events = [e for e in scene.trace.host if e.kind == OP and not any(o.kind == OP for o in e.outer())]
    times: Counter = Counter()
    ends = [end for _, end in spans]
    for event in events:
        scope = event.scope
        while scope is not None and scope.name.startswith("ProfilerStep#"):
            scope = scope.scope
        i, inside = bisect_left(ends, event.begin), 0.0
        while i < len(spans) and spans[i][0] < event.end:
            inside += min(spans[i][1], event.end) - max(spans[i][0], event.begin)
            i += 1
        times[scope.name if scope is not None else event.name] += inside
    total = max(length(spans), 1e-9)
    top = [f"{name} ({us / total:.0%})" for name, us in times.most_common(3) if us > 0.02 * total]
    return ", ".join(top) or "between ops, in Python"


def zeroed_gradients(scene: Scene) -> Iterator[Finding]:
    """Gradients filled with zeros are written, then read and added to; dropped ones are only written."""
    trace = scene.trace
    fills = [e for e in trace.ops if e.name in ("aten::zero_", "aten::_foreach_zero_") and _in_zero_grad(e)]
    fills = [e for e in fills if not any(outer.name == "aten::_foreach_zero_" for outer in e.outer())]
    if not fills:
        return
    adds = [
        e
        for e in trace.ops
        if e.name == "aten::add_" and e.parent and e.parent.name == "torch::autograd::AccumulateGrad"
    ]
    tensors = sum(len(e.dims[0]) if e.name == "aten::_foreach_zero_" and e.dims else 1 for e in fills)
    part, spans = scene.work(fills + adds)
    yield scene.finding(
        ZEROED,
        part,
        spans,
        source_lines(trace, fills),
        f"{scene.per_step(tensors):.4g} gradients a step are filled with zeros, and added into by the backward pass",
        "zero_grad(set_to_none=True), which is the default",
        MEASURED,
    )


def _in_zero_grad(event: Event) -> bool:
    return any(outer.name.startswith(ZERO_GRAD) or outer.name.endswith(": zero_grad") for outer in event.outer())


def returned_memory(scene: Scene) -> Iterator[Finding]:
    """Memory that the allocator returns to the driver and requests again; each call stops the device.

    Where the loop itself calls `empty_cache`, its cost includes the requests that follow.
    """
    trace = scene.trace
    emptied = [
        e for e in trace.host if e.kind == PYTHON and e.name.endswith(": empty_cache") and trace.step_of(e) is not None
    ]
    starting = set(start_up_calls(trace))
    calls = [e for e in trace.calls if _RESERVES.fullmatch(e.name) and e not in starting]
    steady = {trace.step_of(e) for e in calls} - {0}  # the first step may reserve what all need
    again = calls if trace.steps[0].name != WHOLE and len(steady) >= max(2, len(trace.steps) / 2) else []
    if not emptied + again:
        return
    choices = {IDLE: scene.idle(of(emptied + again))} if scene.account else {}
    part, spans = scene.larger(choices) if choices else scene.work(emptied)
    yield scene.finding(
        RETURNED,
        part,
        spans,
        scene.where(emptied or again),
        f"{scene.per_step(len(again)):.3g} calls of {again[0].name if again else 'empty_cache'} and its like a step",
        "remove torch.cuda.empty_cache() from the loop"
        if emptied
        else "let shapes repeat, or set PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True",
        BOUND,
    )


def allocations(scene: Scene) -> int:
    """Calls that reserve memory."""
    return sum(e.kind == RUNTIME and "alloc" in e.name.lower() for e in scene.trace.host)
