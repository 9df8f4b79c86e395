"""Who waits for whom: the host for the device, the device for the loader, both for a copy."""

import re
from collections.abc import Iterator

from ..busy import covered, kernel_spans
from ..events import COPY, LOADER, OP, OPTIMIZER, PYTHON, RUNTIME, Event, Trace
from ..places import by_place, frames, places
from .finding import HOST_WAITS, LOADER_WAITS, PAGEABLE, Finding

# What the loader may take of a step before it is reported.
LOADER_SHARE = 0.1

_WAITS = re.compile(
    r"(cuda|cu|hip)(Stream|Device|Event|Ctx)Synchronize(_\w+)?"
    r"|(cuda|hip)Memcpy(_\w+)?|hipMemcpyWithStream|cuMemcpy(HtoD|DtoH)(_v2)?"
)
# Ops whose result has a size that depends on values, or is a Python number: the host must know.
_READS = {"aten::_local_scalar_dense", "aten::nonzero", "aten::masked_select", "aten::_unique2", "aten::unique_dim"}
_READS_IN_PYTHON = re.compile(r"<built-in method (cpu|tolist) of (Tensor|Parameter) object")

_ADVICE = {
    "aten::_local_scalar_dense": "add it up on the device and read it every n-th step, after the backward pass",
    "aten::nonzero": "use torch.where or multiply by the mask: the host waits to learn the size of what a mask selects",
    "copy": "copy with non_blocking=True from pinned memory, and read what comes back a step later",
    "wait": "remove the synchronisation; to time the device use CUDA events, and read them at the end",
}


def host_waits(trace: Trace) -> Iterator[Finding]:
    """The host stops until the device has done all that was queued; then nothing is queued, and the device idles."""
    events = _waits_on_gpu(trace) if trace.on_gpu else _waits_on_cpu(trace)
    basis = (
        "measured: the time that the host waits"
        if trace.on_gpu
        else "at least: the reading alone; on a GPU the host waits here until all queued work is done"
    )
    for by in dict.fromkeys(map(_reader, events)):
        for group in by_place(trace, [e for e in events if _reader(e) == by]).values():
            where = places(trace, group)
            yield Finding(
                HOST_WAITS,
                where if by in where else f"{where}: {by}",
                trace.per_step(len({_op_around(e) or e for e in group})),
                trace.per_step(sum(e.us for e in group)) / 1e3,
                basis,
                _ADVICE[_kind(group[0])],
            )


def _waits_on_gpu(trace: Trace) -> list[Event]:
    """Calls that wait. What waits for a copy from pageable memory is reported as such a copy.

    A copy into pageable memory waits in the call that starts it: the synchronisation after it has nothing left to do.
    """
    last_work = max((e.begin for e in trace.host if e.kind == OP), default=0.0)  # the profiler itself waits at its end
    pageable = {_copying_op(e) for e in trace.device if _is_pageable(e)}
    return [
        call
        for call in trace.calls
        if (_WAITS.fullmatch(call.name) or any(map(_is_read_to_pageable, call.children)))
        and (_op_around(call) or call.begin <= last_work)
        and _op_around(call) not in pageable
    ]


def _waits_on_cpu(trace: Trace) -> list[Event]:
    """Reads that would wait on a GPU, where the loop or the model asks for them and not torch for itself."""
    reads = [e for e in trace.ops if e.name in _READS and not e.backward]
    reads = [e for e in reads if not any(o.name in _READS for o in e.outer())]
    steps = {
        e for e in trace.host if e.kind == PYTHON and _READS_IN_PYTHON.match(e.name) and trace.step_of(e) is not None
    }
    reads += [e for e in steps if not any(inner.name in _READS for inner in e.inner())]
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
    """What it is that waits: the outermost op (aten::item), the method, or the call itself."""
    ops = [e.name for e in (event, *event.outer()) if e.kind == OP and not e.name.startswith("autograd::")]
    method = _READS_IN_PYTHON.match(event.name)
    return ops[-1] if ops else f".{method[1]}()" if method else event.name


def loader_waits(trace: Trace) -> Iterator[Finding]:
    """Data is made while the device has nothing to do: on a GPU the idle time, elsewhere all the time in the loader."""
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
    where = places(trace, fetches)
    name = fetches[0].name.removeprefix(LOADER)
    yield Finding(
        LOADER_WAITS, where if name in where else f"{where}: {name}", trace.per_step(len(fetches)), cost, basis, advice
    )


def pageable_copies(trace: Trace) -> Iterator[Finding]:
    """The driver copies pageable memory into pinned memory first, and the host waits for both."""
    groups = by_place(trace, [e for e in trace.device if _is_pageable(e) and trace.step_of(e) is not None])
    for group in groups.values():
        ops = dict.fromkeys(_copying_op(e) for e in group)
        waited = sum(call.us for op in ops for call in (op.inner() if op.kind == OP else [op]) if call.kind == RUNTIME)
        mib = trace.per_step(sum(float(e.args.get("bytes", 0)) for e in group)) / 2**20
        yield Finding(
            PAGEABLE,
            places(trace, group),
            trace.per_step(len(group)),
            trace.per_step(max(waited, sum(e.us for e in group))) / 1e3,
            f"measured: the copy, or the host's wait for it if longer; {mib:.3g} MiB a step",
            "pin_memory=True in the DataLoader, then .to(device, non_blocking=True); build constants on the device",
        )


def _is_pageable(event: Event) -> bool:
    return event.kind == COPY and "HtoD" in event.name and "Pageable" in event.name


def _is_read_to_pageable(event: Event) -> bool:
    return event.kind == COPY and "DtoH" in event.name and "Pageable" in event.name


def _op_around(event: Event) -> Event | None:
    return next((outer for outer in event.outer() if outer.kind == OP), None)


def _copying_op(event: Event) -> Event:
    """The op that a copy belongs to, or failing that the call."""
    return _op_around(event) or event.parent or event
