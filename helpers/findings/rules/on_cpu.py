"""Rules for a CPU's profile.

A CPU runs one op after another, so an op's time is what the step takes for it. Tensors that fit in a core's cache cost
little to write and read again; larger ones cost a pass through memory for each op.
"""

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import replace
from math import prod
from statistics import median

import numpy as np

from ...script.rates import ATTENTION, CONVOLUTION, FP64
from ...script.settings import ONE_THREAD
from ..account import OPERATORS, PYTHON_CODE, covered, intersect, of, subtract, union
from ..scene import SEVERAL, Scene
from ..source_places import BACK, by_source_line, user_frame
from ..summary import ESTIMATE, Finding
from ..trace import OP, Event, aten
from . import products
from .needless import VIEWS, outermost

CACHE = 2**20  # bytes: a core's second-level cache holds about as much
ITEMSIZES = {"float": 4, "double": 8, "c10::Half": 2, "c10::BFloat16": 2}
LEAST_CHAIN = 3  # ops in a row
SMALL_US, SHARED_US = 50, 100  # of an op: below, its call takes the time; above, several threads share it
NEARLY_ALL = 0.75  # of small operators' time, from one line, whose loop one operator could replace
_CONVOLUTIONS = aten("convolution convolution_backward")
_ELEMENTWISE = aten(
    "add sub rsub mul div neg reciprocal exp log log2 sqrt rsqrt pow abs erf sin cos tanh sigmoid relu gelu silu "
    "softmax log_softmax softplus clamp clamp_min clamp_max maximum minimum where masked_fill dropout add_ "
    "sub_ mul_ div_ neg_ exp_ log_ sqrt_ relu_ clamp_ masked_fill_"
)


def handmade_attention(scene: Scene) -> Iterator[Finding]:
    """Attention in separate ops; on a CPU all of it is faster fused, by as much as was measured where it ran."""
    rates = scene.trace.about.get("bf16_speedup", {})
    if scene.account:
        yield from products.handmade_attention(scene)
    elif softmaxes := [softmax for _, softmax, _ in products.attentions(scene.trace)]:
        speedup = _between(rates, max(map(_bytes, softmaxes)), f"{ATTENTION} ")
        yield from products.handmade_attention(scene, max(1 - 1 / speedup, 0.0), whole=True)


def fp32_products(scene: Scene) -> Iterator[Finding]:
    """Products in fp32 on a CPU that multiplies bf16 numbers faster, as was measured where the profile was recorded.

    Each training in fp32 has them, so they are an option and no fault.
    """
    rates = scene.trace.about.get("bf16_speedup")
    if scene.account is not None or not rates:
        return
    ops = [op for op in scene.trace.ops if _multiplies(op, "float")]
    total_us = sum(op.us for op in ops)
    saved_us = sum(op.us * (1 - 1 / _bf16_speedup(op, rates)) for op in ops)
    if saved_us <= 0:
        return
    spans, speedup = intersect(of(ops), scene.parts[OPERATORS]), total_us / (total_us - saved_us)
    evidence = (
        f"{scene.each(len(ops), 'product')}, {scene.time(spans)}, {scene.share(spans):.0%} of the time; layers of "
        f"their sizes are {speedup:.2g}× as fast under autocast on this CPU"
    )
    work, where, saved = (OPERATORS, spans), scene.where(ops), 1 - 1 / speedup
    yield replace(scene.finding("fp32 products", work, where, evidence, ESTIMATE, saved), option=True)


def slow_half(scene: Scene) -> Iterator[Finding]:
    """Products in 16 bits where the CPU is slower at them than in fp32: it has no units for them, or they are small."""
    rates = scene.trace.about.get("bf16_speedup")
    if scene.account is not None or not rates:
        return
    ops = [op for op in scene.trace.ops if _multiplies(op, "c10::BFloat16", "c10::Half")]
    total_us = sum(op.us for op in ops)
    fp32_us = sum(op.us * _bf16_speedup(op, rates) for op in ops)
    if fp32_us >= total_us:
        return
    spans, slower = intersect(of(ops), scene.parts[OPERATORS]), total_us / fp32_us
    evidence = (
        f"{scene.each(len(ops), 'product')} in 16 bits, {scene.time(spans)}, {scene.share(spans):.0%} of the time; "
        f"layers of their sizes take {slower:.2g}× as long as in fp32 on this CPU"
    )
    work, saved = (OPERATORS, spans), 1 - 1 / slower
    yield scene.finding("slow 16-bit products", work, scene.where(ops), evidence, ESTIMATE, saved)


def fp64_products(scene: Scene) -> Iterator[Finding]:
    """Products in fp64, and what else is computed in it: a register holds half as many of its numbers."""
    ops = [op for op in scene.trace.ops if op.name in products.MATRICES and "double" in op.types[:3]]
    if scene.account is not None or not ops:
        return
    speedup = scene.trace.about.get("bf16_speedup", {}).get(FP64, 2.0)
    spans = intersect(of(ops), scene.parts[OPERATORS])
    evidence = f"{scene.each(len(ops), 'product')}, {scene.time(spans)}, {scene.share(spans):.0%} of it"
    work, factor = (OPERATORS, spans), max(1 - 1 / speedup, 0.5)
    yield scene.finding("fp64 products", work, scene.where(ops), evidence, ESTIMATE, factor)


def _bf16_speedup(op: Event, rates: dict[str, float]) -> float:
    """How much faster a layer like this one is under autocast: by the size of its product, between those measured.

    Those are of cubes. A narrower product reads more bytes for the same operations and gains less: it counts as a cube
    of a size between the one of as many operations and its narrowest side.
    """
    if op.name in _CONVOLUTIONS:
        return rates.get(CONVOLUTION, 1.0)
    product = products.product(op)
    if product is None:
        return 1.0
    return _between(rates, ((product.operations / 2) ** (1 / 3) * min(product.m, product.k, product.n)) ** 0.5)


def _between(rates: dict[str, float], size: float, prefix: str = "") -> float:
    """The speedup at a size, between those measured of a kind."""
    kinds = {kind.removeprefix(prefix): speedup for kind, speedup in rates.items() if kind.startswith(prefix)}
    sizes = sorted((int(kind), speedup) for kind, speedup in kinds.items() if kind.isdigit())
    if not sizes:
        return 1.0
    return float(np.interp(np.log(size), [np.log(each) for each, _ in sizes], [speedup for _, speedup in sizes]))


def _multiplies(op: Event, *dtypes: str) -> bool:
    """Whether an op multiplies matrices of a type, none of them so narrow that the product is bound by memory."""
    if op.name in _CONVOLUTIONS:
        return any(dtype in op.types[:3] for dtype in dtypes)
    product = products.product(op) if op.name in products.MATRICES else None
    return product is not None and product.dtype in dtypes and min(product.m, product.k, product.n) > products.SMALL


def small_operators(scene: Scene, explained: list[Finding]) -> Iterator[Finding]:
    """Operators so short that calling them takes the time, and the gaps between; but for what others explain.

    Short are those whose name's median is, as some wait for a core. Nothing where they are less than half of the time
    of all.
    """
    if scene.account is not None:
        return
    trace = scene.trace
    ops = [e for e in trace.ops if e.track == trace.thread and not any(outer.kind == OP for outer in e.outer())]
    medians = _medians(ops)
    small = [op for op in ops if medians[op.name] < SMALL_US]
    if 2 * sum(op.us for op in small) < sum(op.us for op in ops):
        return
    known = union([span for finding in explained for span in finding.spans])
    small = [op for op in small if 2 * covered(known, op.begin, op.end) < op.us]
    if not small:
        return
    gaps = [span for span in scene.parts[PYTHON_CODE] if span[1] - span[0] < SMALL_US]
    spans = subtract(union(of(small) + gaps), known)
    evidence = f"{scene.each(len(small), 'operator')} of under {SMALL_US} µs, a median of "
    evidence += f"{median(op.us for op in small):.0f} µs; with the Python between them {scene.time(spans)}"
    lines: dict[str, float] = defaultdict(float)
    for line, group in by_source_line(trace, small).items():
        lines[line.removesuffix(BACK)] += sum(medians[op.name] for op in group)
    spread = max(lines.values()) < NEARLY_ALL * sum(lines.values())
    yield replace(
        scene.finding("small operators", (SEVERAL, spans), scene.where(small), evidence, ESTIMATE), spread=spread
    )


def _medians(ops: list[Event]) -> dict[str, float]:
    """An operator's usual time, by its name."""
    times: dict[str, list[float]] = defaultdict(list)
    for op in ops:
        times[op.name].append(op.us)
    return {name: median(of_name) for name, of_name in times.items()}


def one_thread(scene: Scene) -> Iterator[Finding]:
    """Operators long enough to be shared among cores, of which one computes."""
    settings = scene.trace.about.get("settings", {})
    if scene.account is None and ONE_THREAD in settings:
        medians = _medians(scene.trace.ops)
        ops = [op for op in scene.trace.ops if medians[op.name] > SHARED_US and op.name.startswith("aten::")]
        evidence = (
            f"torch uses 1 of {settings['cores']} cores; {scene.time(of(ops))} in operators of over {SHARED_US} µs"
        )
        work, saved = (SEVERAL, of(ops)), 1 - 1 / settings["cores"]
        yield scene.finding("one thread", work, settings[ONE_THREAD], evidence, ESTIMATE, saved)


def unfused_chains(scene: Scene) -> Iterator[Finding]:
    """Elementwise ops in a row on tensors too large for the cache, forward and backward.

    Each is taken to cost one pass through memory; an op that does all at once needs one in either direction.
    Conversions to another type end a chain: the loss in one op needs them, too.
    """
    if scene.account is not None:
        return
    trace, lasts, spans, count = scene.trace, [], [], 0
    for chain in _chains(scene):
        backward = [e for e in trace.with_backward(chain) if e.backward is e]
        if backward:
            lasts.append(chain[-1])
            count += len(chain) + len(backward)
            spans += of(chain + backward)
    if lasts:
        spans = intersect(union(spans), scene.parts[OPERATORS])
        evidence = f"{scene.per_step(count):.4g} ops in a row on tensors that don't fit in the cache, "
        evidence += f"{scene.time(spans)} forward and backward"
        work, where, saved = (OPERATORS, spans), scene.where(lasts), 1 - 2 * len(lasts) / count
        yield scene.finding("unfused elementwise operations", work, where, evidence, ESTIMATE, saved, case="CPU")


def _chains(scene: Scene) -> Iterator[list[Event]]:
    """Elementwise ops of the forward pass that follow each other in a function, each on as many elements."""
    trace = scene.trace
    attention = {op for trio in products.attentions(trace) for op in trio}
    chain: list[Event] = []
    for op in [*outermost(trace), None]:
        if op is not None and op.name in VIEWS - {"aten::to", "aten::contiguous"}:
            continue
        follows = op is not None and op.name in _ELEMENTWISE and _bytes(op) > CACHE
        alike = follows and chain and prod(op.shape) == prod(chain[0].shape)
        if chain and not (alike and user_frame(op) is user_frame(chain[0])):
            if len(chain) >= LEAST_CHAIN and not any(e in attention for op in chain for e in (op, *op.inner())):
                yield chain
            chain = []
        if follows:
            chain.append(op)


def _bytes(op: Event) -> int:
    """Of the op's first input."""
    return prod(op.shape) * ITEMSIZES.get(op.types[0], 0) if op.shape and op.types else 0


DETAILED_RULES = (handmade_attention, fp32_products, slow_half, fp64_products, one_thread, unfused_chains)
