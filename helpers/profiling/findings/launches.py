"""Work in too many pieces: loops over parameters, kernels shorter than their launch, memory asked for again."""

import re
from collections import Counter
from collections.abc import Iterator
from itertools import groupby

from ..busy import covered, device_windows, kernel_spans
from ..events import KERNEL, OP, OPTIMIZER, PYTHON, ZERO_GRAD, Event, Trace
from ..places import by_place, places
from .finding import OPTIMIZER as UNFUSED
from .finding import RETURNED, TINY_KERNELS, ZEROED, Finding

WITH_FUSED = {"Adam", "AdamW", "SGD", "Adagrad"}  # torch's optimizers that take fused=True
LOOP = 50  # ops in a step of an optimizer that we do not know
LAUNCH_US = 8.0  # about what an op costs the host, from Python to the launch of its kernel
MANY = 100  # kernels in a step
IDLE = 0.2  # of the step, the loader's share left out

_RESERVES = re.compile(r"(cuda|hip)(Malloc|Free)(Async)?(_\w+)?|cuMem(Create|Release|Map|Unmap)")


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
            places(trace, group),
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
    """Kernels that last less, on average, than launching them costs the host; so the device waits for the host.

    The gaps in a trace alone don't prove it: with `with_stack=True` the profiler slows the host several times, and any
    loop shows gaps. So the host's cost is taken as what it is without a profiler.
    """
    kernels = [e for e in trace.device if e.kind == KERNEL and trace.step_of(e) is not None]
    busy = sum(e.us for e in kernels)
    lacking = trace.per_step(len(kernels) * LAUNCH_US - busy)
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
        f"estimate: {LAUNCH_US:g} µs for each launch less the {busy / len(kernels):.1f} µs that a kernel runs",
        "torch.compile (mode='reduce-overhead' records CUDA graphs), larger batches, fused ops",
    )


def _op_name(kernel: Event) -> str:
    return next((outer.name for outer in kernel.outer() if outer.kind == OP), kernel.name)


def zeroed_gradients(trace: Trace) -> Iterator[Finding]:
    """Gradients filled with zeros are written, read and added to; dropped ones are just replaced."""
    within = [e for e in trace.ops if e.name in ("aten::zero_", "aten::_foreach_zero_") and _in_zero_grad(e)]
    within = [e for e in within if not any(outer.name == "aten::_foreach_zero_" for outer in e.outer())]
    if not within:
        return
    adds = [
        e
        for e in trace.ops
        if e.name == "aten::add_" and e.parent and e.parent.name == "torch::autograd::AccumulateGrad"
    ]
    tensors = sum(len(e.dims[0]) if e.name == "aten::_foreach_zero_" and e.dims else 1 for e in within)
    yield Finding(
        ZEROED,
        places(trace, within),
        trace.per_step(tensors),
        trace.ms(within + adds),
        "measured: filling with zeros, and adding into them in the backward pass; count is of gradients",
        "zero_grad(set_to_none=True), which is the default",
    )


def _in_zero_grad(event: Event) -> bool:
    return any(outer.name.startswith(ZERO_GRAD) or outer.name.endswith(": zero_grad") for outer in event.outer())


def returned_memory(trace: Trace) -> Iterator[Finding]:
    """Memory that the allocator gives back to the driver and asks for again; each call stops the device.

    Where the loop itself gives it back, what asks for it again is part of what that costs.
    """
    emptied = [
        e for e in trace.host if e.kind == PYTHON and e.name.endswith(": empty_cache") and trace.step_of(e) is not None
    ]
    calls = [e for e in trace.calls if _RESERVES.fullmatch(e.name) and not any(o in emptied for o in e.outer())]
    steady = {trace.step_of(e) for e in calls} - {0}  # the first step may reserve what all need
    again = calls if len(steady) >= max(2, len(trace.steps) / 2) else []
    for group in by_place(trace, emptied).values():
        us = sum(e.us for e in group) + sum(e.us for e in again) * len(group) / len(emptied)
        yield _returned(trace, group, us, "remove torch.cuda.empty_cache() from the loop")
    for group in by_place(trace, [] if emptied else again).values():
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
        places(trace, group),
        trace.per_step(len(group)),
        trace.per_step(us) / 1e3,
        basis,
        advice,
    )
