"""Waits: of the host for the device, of the device for the loader, of both for a copy. Work in too many pieces: loops
over parameters, kernels shorter than their launch, memory returned to the driver and requested again.
"""

import re
from collections import Counter
from collections.abc import Iterator
from itertools import groupby

from ..device_time import covered, device_windows, kernel_spans
from ..trace import (
    COPY,
    KERNEL,
    LOADER,
    OP,
    OPTIMIZER,
    PYTHON,
    RUNTIME,
    ZERO_GRAD,
    Event,
    Trace,
    by_source_line,
    frames,
    source_lines,
)
from . import HOST_WAITS, LOADER_WAITS, PAGEABLE, RETURNED, TINY_KERNELS, UNFUSED, ZEROED, Finding

LOADER_SHARE = 0.1  # of a step: a loader that takes less is not reported

_WAITS = re.compile(
    r"(cuda|cu|hip)(Stream|Device|Event|Ctx)Synchronize(_\w+)?"
    r"|(cuda|hip)Memcpy(_\w+)?|hipMemcpyWithStream|cuMemcpy(HtoD|DtoH)(_v2)?"
)
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
LOOP = 50  # ops in a step of an unknown optimizer from which on it counts as a loop
LAUNCH_US = 8.0  # about what an op costs the host, from Python to the launch of its kernel
MANY = 100  # kernels in a step, fewer are not reported
IDLE = 0.2  # of the step, without the loader's share: less is not reported

_RESERVES = re.compile(r"(cuda|hip)(Malloc|Free)(Async)?(_\w+)?|cuMem(Create|Release|Map|Unmap)")


def host_waits(trace: Trace) -> Iterator[Finding]:
    """The host waits until all queued work is done; then the queue is empty, and the device idles."""
    events = _waits_on_gpu(trace) if trace.on_gpu else _waits_on_cpu(trace)
    basis = (
        "measured: the time that the host waits"
        if trace.on_gpu
        else "at least: the reading alone; on a GPU the host waits here until all queued work is done"
    )
    for reader in dict.fromkeys(map(_reader, events)):
        for group in by_source_line(trace, [e for e in events if _reader(e) == reader]).values():
            where = source_lines(trace, group)
            yield Finding(
                HOST_WAITS,
                where if reader in where else f"{where}: {reader}",
                trace.per_step(len({_enclosing_op(e) or e for e in group})),
                trace.per_step(sum(e.us for e in group)) / 1e3,
                basis,
                _ADVICE[_kind(group[0])],
            )


def _waits_on_gpu(trace: Trace) -> list[Event]:
    """Calls that wait. Waits for copies from pageable memory are left out: `pageable_copies` reports them.

    A copy into pageable memory waits in the call that starts it, so the synchronisation after it takes no time.
    """
    last_work = max((e.begin for e in trace.host if e.kind == OP), default=0.0)  # later waits are the profiler's own
    pageable = {_copying_op(e) for e in trace.device if _is_pageable(e)}
    return [
        call
        for call in trace.calls
        if (_WAITS.fullmatch(call.name) or any(map(_is_read_to_pageable, call.children)))
        and (_enclosing_op(call) or call.begin <= last_work)
        and _enclosing_op(call) not in pageable
    ]


def _waits_on_cpu(trace: Trace) -> list[Event]:
    """Reads by the loop or the model that would wait on a GPU, without those of torch's loader and optimizer."""
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


def loader_waits(trace: Trace) -> Iterator[Finding]:
    """Time in the loader: on a GPU the part in which the device is idle, on a CPU all of it."""
    fetches = trace.fetches
    if not fetches:
        return
    spent = sum(e.us for e in fetches)
    if trace.on_gpu:
        spans = kernel_spans(trace)
        spent -= sum(covered(spans, e.begin, e.end) for e in fetches)
    cost = trace.per_step(spent) / 1e3
    if cost < LOADER_SHARE * trace.step_ms:
        return
    basis = "measured: time in the loader in which no kernel runs" if trace.on_gpu else "measured: time in the loader"
    single = any("SingleProcess" in e.name for e in fetches)
    advice = (
        "give the DataLoader num_workers, persistent_workers and pin_memory; do once what doesn't change by epoch"
        if single
        else "more workers or a larger prefetch_factor; do less for each sample, and once what doesn't change by epoch"
    )
    where = source_lines(trace, fetches)
    name = fetches[0].name.removeprefix(LOADER)
    yield Finding(
        LOADER_WAITS, where if name in where else f"{where}: {name}", trace.per_step(len(fetches)), cost, basis, advice
    )


def pageable_copies(trace: Trace) -> Iterator[Finding]:
    """The driver first copies pageable memory into pinned memory, and the host waits for both copies."""
    groups = by_source_line(trace, [e for e in trace.device if _is_pageable(e) and trace.step_of(e) is not None])
    for group in groups.values():
        ops = dict.fromkeys(_copying_op(e) for e in group)
        waited = sum(call.us for op in ops for call in (op.inner() if op.kind == OP else [op]) if call.kind == RUNTIME)
        mib = trace.per_step(sum(float(e.args.get("bytes", 0)) for e in group)) / 2**20
        yield Finding(
            PAGEABLE,
            source_lines(trace, group),
            trace.per_step(len(group)),
            trace.per_step(max(waited, sum(e.us for e in group))) / 1e3,
            f"measured: the copy, or the host's wait for it if longer; {mib:.3g} MiB a step",
            "pin_memory=True in the DataLoader, then .to(device, non_blocking=True); build constants on the device",
        )


def _is_pageable(event: Event) -> bool:
    return event.kind == COPY and "HtoD" in event.name and "Pageable" in event.name


def _is_read_to_pageable(event: Event) -> bool:
    return event.kind == COPY and "DtoH" in event.name and "Pageable" in event.name


def _enclosing_op(event: Event) -> Event | None:
    return next((outer for outer in event.outer() if outer.kind == OP), None)


def _copying_op(event: Event) -> Event:
    """The op that a copy belongs to, or else the call."""
    return _enclosing_op(event) or event.parent or event


def unfused_optimizer(trace: Trace) -> Iterator[Finding]:
    """An optimizer's step as one op for each parameter and each line of its formula, or (foreach) for each line."""
    steps = [e for e in trace.annotations if e.name.startswith(OPTIMIZER)]
    for name, group in _by_name(steps).items():
        ops = [e for step in group for e in step.inner() if e.kind == OP and e.name.startswith("aten::")]
        if not ops or any(op.name.startswith("aten::_fused_") for op in ops):
            continue
        kind = name.removeprefix(OPTIMIZER).split(".")[0]
        foreach = any(op.name.startswith("aten::_foreach_") for op in ops)
        calls = sum(not any(outer.name.startswith("aten::") for outer in op.outer()) for op in ops)
        if kind not in WITH_FUSED and (foreach or "fused" in kind.lower() or trace.per_step(calls) < LOOP):
            continue
        host = sum(e.us for e in group)
        cost = trace.per_step(max(host, sum(e.device_us for e in group)) if trace.on_gpu else host) / 1e3
        yield Finding(
            UNFUSED,
            source_lines(trace, group),
            trace.per_step(calls),
            cost,
            f"at most: the whole step, {'foreach' if foreach else 'one parameter after another'}; count is of ops",
            f"{kind}(…, fused=True)"
            if kind in WITH_FUSED
            else f"{kind}(…, foreach=True), or an optimizer with fused=True",
        )


def _by_name(events: list[Event]) -> dict[str, list[Event]]:
    ordered = sorted(events, key=lambda e: e.name)
    return {name: list(group) for name, group in groupby(ordered, key=lambda e: e.name)}


def launch_bound(trace: Trace) -> Iterator[Finding]:
    """Kernels that on average take less time than their launch costs the host, so that the device waits for the host.

    Gaps in a trace alone don't prove it: with `with_stack=True` the profiler slows the host several times, and any loop
    shows gaps. So a launch is taken to cost `LAUNCH_US`, as it does without a profiler.
    """
    kernels = [e for e in trace.device if e.kind == KERNEL and trace.step_of(e) is not None]
    device_us = sum(e.us for e in kernels)
    lacking = trace.per_step(len(kernels) * LAUNCH_US - device_us)
    if trace.per_step(len(kernels)) < MANY or lacking <= 0:
        return
    spans, windows = kernel_spans(trace), device_windows(trace)
    length = sum(end - begin for begin, end in windows)
    idle = length - sum(covered(spans, begin, end) for begin, end in windows)
    idle -= sum(e.us - covered(spans, e.begin, e.end) for e in trace.fetches) / len(trace.steps) * len(windows)
    if idle < IDLE * length:
        return
    tiny = [e for e in kernels if e.us < LAUNCH_US]
    name, often = Counter(_op_name(e) for e in tiny).most_common(1)[0]
    yield Finding(
        TINY_KERNELS,
        f"most of them by {name} ({trace.per_step(often):.0f} a step)",
        trace.per_step(len(tiny)),
        min(lacking, idle / len(windows)) / 1e3,
        f"estimate: {LAUNCH_US:g} µs for each launch less the {device_us / len(kernels):.1f} µs that a kernel runs",
        "torch.compile (mode='reduce-overhead' records CUDA graphs), larger batches, fused ops",
    )


def _op_name(kernel: Event) -> str:
    return next((outer.name for outer in kernel.outer() if outer.kind == OP), kernel.name)


def zeroed_gradients(trace: Trace) -> Iterator[Finding]:
    """Gradients filled with zeros are written, then read and added to; dropped ones are only written."""
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
    yield Finding(
        ZEROED,
        source_lines(trace, fills),
        trace.per_step(tensors),
        trace.ms(fills + adds),
        "measured: filling with zeros, and adding into them in the backward pass; count is of gradients",
        "zero_grad(set_to_none=True), which is the default",
    )


def _in_zero_grad(event: Event) -> bool:
    return any(outer.name.startswith(ZERO_GRAD) or outer.name.endswith(": zero_grad") for outer in event.outer())


def returned_memory(trace: Trace) -> Iterator[Finding]:
    """Memory that the allocator returns to the driver and requests again; each call stops the device.

    Where the loop itself calls `empty_cache`, its cost includes the requests that follow.
    """
    emptied = [
        e for e in trace.host if e.kind == PYTHON and e.name.endswith(": empty_cache") and trace.step_of(e) is not None
    ]
    calls = [e for e in trace.calls if _RESERVES.fullmatch(e.name) and not any(o in emptied for o in e.outer())]
    steady = {trace.step_of(e) for e in calls} - {0}  # the first step may reserve what all need
    again = calls if len(steady) >= max(2, len(trace.steps) / 2) else []
    for group in by_source_line(trace, emptied).values():
        us = sum(e.us for e in group) + sum(e.us for e in again) * len(group) / len(emptied)
        yield _returned(trace, group, us, "remove torch.cuda.empty_cache() from the loop")
    for group in by_source_line(trace, [] if emptied else again).values():
        us = sum(e.us for e in group)
        yield _returned(trace, group, us, "let shapes repeat, or set PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True")


def _returned(trace: Trace, group: list[Event], us: float, advice: str) -> Finding:
    basis = (
        "measured: the calls to the driver"
        if trace.on_gpu
        else "measured, but without a GPU there is nothing to return"
    )
    return Finding(
        RETURNED,
        source_lines(trace, group),
        trace.per_step(len(group)),
        trace.per_step(us) / 1e3,
        basis,
        advice,
    )
