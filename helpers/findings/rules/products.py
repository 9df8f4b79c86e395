"""Matrix products: their sizes, type and settings, and products that together are attention.

A product of an (m × k) by a (k × n) matrix is read from the shapes that `record_shapes=True` records. m counts rows
(batch × tokens) and may be anything; k and n are the row strides of the operands and of the result, so they decide
whether the tensor cores can load rows in 16-byte pieces.
"""

import re
from bisect import bisect_left
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from math import prod

from ...lab.arguments import has_form
from ...lab.cards import likely
from ...script.rates import TFLOPS
from ..account import COMPUTE, OPERATORS, is_collective, length
from ..scene import Scene, larger, totals
from ..summary import ESTIMATE, Finding, milliseconds
from ..trace import KERNEL, PYTHON, Event, Note, Trace, aten

ALIGNED_TO = {"c10::Half": 8, "c10::BFloat16": 8, "float": 4}  # elements in 16 bytes
RATE = "rate of products"  # a kind of note
SMALL = 16  # sizes up to this are given by the task (classes, features)
MATTERS = 0.05  # of the operations of all products: a source line with less is not reported
PAIRS, LEAST_PAIRED = 8, 2**18  # times as many elements as in either tensor, and in all, that are pairs' to be told
CHAINS_MATTER = 0.4  # of the compute time: what an eager network without chains stays below

MATRICES = {"aten::mm": (0, 1), "aten::addmm": (1, 2), "aten::bmm": (0, 1), "aten::baddbmm": (1, 2)}
_CONVOLUTIONS = {"aten::cudnn_convolution", "aten::convolution_overrideable", "aten::_conv_depthwise2d"}
_BATCHED = {"aten::bmm", "aten::baddbmm"}
_OF_TWO = aten("add sub rsub mul div cosine_similarity")
_SUMS = aten("sum mean norm linalg_vector_norm")
_SOFTMAX = {"aten::_softmax", "aten::_safe_softmax"}
_FLEX = re.compile(r"flex_attention\.py\(\d+\): sdpa_dense(_backward)?$")
_MASKED = aten("_scaled_dot_product_efficient_attention _scaled_dot_product_cudnn_attention")

# What kernels do, by their names; the first that matches counts.
_PRODUCT = re.compile(
    r"gemm|gemv|nvjet|scudnn|convolve|winograd|dgrad|wgrad|fprop|cijk_|xmma|cublas|cutlass.*kernel|implicit|matmul|"
    r"_mm_|_mm\b",
    re.IGNORECASE,
)
_LAYOUT = re.compile(r"nchwToNhwc|nhwcToNchw|nchw2nhwc|nhwc2nchw", re.IGNORECASE)
_ELEMENTWISE = re.compile(r"elementwise|CatArray|direct_copy|at::native.*(reduce_kernel|copy_kernel)")
_16_BIT = re.compile(
    r"bf16|f16|fp16|half|bfloat16|h884|h1688|s16816|hgemm|_HHS_|_BBS_|_HSS_|_BSS_|_HH_|_BB_|e4m3|e5m2|fp8|i8|"
    r"nvjet(_sm\d+)?_[a-z]*[thq]",
    re.IGNORECASE,
)
_TF32 = re.compile(r"tf32|s1688|tensorop_s\d|nvjet", re.IGNORECASE)
_32_BIT = re.compile(r"sgemm|scudnn|<float\b|_SB_|_S_B_|gemmsn|f32f32|winograd.*<float|gemv.*float", re.IGNORECASE)
_TF32_KIND, _FP32_KIND, _16_BIT_KIND = "TF32", "fp32", "16 bits"


@cache
def kind_of(name: str) -> str:
    """What a kernel is by its name: product, layout conversion, elementwise, other."""
    if _LAYOUT.search(name):
        return "layout"
    if _ELEMENTWISE.search(name):
        return "elementwise"
    return "product" if _PRODUCT.search(name) else "other"


def kernels_that(trace: Trace, kind: str) -> list[Event]:
    return [e for e in trace.device if e.kind == KERNEL and kind_of(e.name) == kind]


@cache
def _named_type(name: str) -> str:
    """The type of a product's kernel, by its name; empty where the name doesn't say."""
    if _16_BIT.search(name):
        return _16_BIT_KIND
    if _TF32.search(name):
        return _TF32_KIND
    return _FP32_KIND if _32_BIT.search(name) else ""


def product_type(kernel: Event) -> str:
    """The type that a product's kernel computes in, by its name, or else by the inputs of the op that launched it."""
    if named := _named_type(kernel.name):
        return named
    for outer in kernel.outer():
        if outer.name in MATRICES or outer.name in _CONVOLUTIONS or outer.name == "aten::convolution_backward":
            types = outer.types[:3]
            return _FP32_KIND if "float" in types else _16_BIT_KIND if types else ""
    return ""


@dataclass(frozen=True)
class Product:
    op: Event
    batch: int
    m: int
    k: int
    n: int
    dtype: str

    @property
    def operations(self) -> int:
        return 2 * self.batch * self.m * self.k * self.n


def products(trace: Trace) -> list[Product]:
    """The products of the forward pass, in order."""
    return [p for op in trace.ops if op.name in MATRICES and op.backward is None and (p := product(op))]


def product(op: Event) -> Product | None:
    """None where the shapes aren't recorded."""
    operands = MATRICES[op.name]
    if len(op.dims) <= max(operands):
        return None
    left, right = (op.dims[i] for i in operands)
    if len(left) not in (2, 3) or len(left) != len(right) or not has_form(left + right, [int]):
        return None
    dtype = op.types[operands[0]] if len(op.types) > operands[0] else ""
    return Product(op, prod(left[:-2]), left[-2], left[-1], right[-1], dtype)


def unaligned_sizes(scene: Scene) -> Iterator[Finding]:
    """Rows of 255 or 1023 elements don't begin at multiples of 16 bytes: the fast kernels can't be used."""
    trace = scene.trace
    attention = {op for trio in attentions(trace) for op in trio}
    all_products = products(trace)
    total = sum(p.operations for p in all_products)
    unaligned = [p for p in all_products if _unaligned(p) and p.op not in attention]
    if not unaligned or sum(p.operations for p in unaligned) < MATTERS * total:
        return
    sizes, ops = sorted({size for p in unaligned for size in _unaligned(p)}), [p.op for p in unaligned]
    work, where = scene.products(trace.with_backward(ops)), f"{scene.where(ops)}: {', '.join(map(str, sizes))}"
    evidence = f"{scene.each(len(ops), 'product')}, {scene.time(work[1])} forward and backward"
    evidence += "; rows that don't begin at multiples of 16 bytes"
    better = ", ".join(f"{s} → {-(-s // 8) * 8}" for s in sizes[:4])
    factor = 0.5 if scene.account else 0.1
    yield scene.finding("unaligned sizes", work, where, evidence, ESTIMATE, factor, sizes=better)


def _unaligned(product: Product) -> list[int]:
    """The sizes whose rows don't begin at multiples of 16 bytes."""
    unit = ALIGNED_TO.get(product.dtype)
    return [size for size in (product.k, product.n) if unit and size > SMALL and size % unit]


def reached(scene: Scene) -> Iterator[Note]:
    """What products reach of the device's rate, since a device may compute all the time and still be slow."""
    ops = {op: p for op in scene.trace.ops if op.name in MATRICES and (p := product(op)) and p.operations}
    us = {op: op.us if scene.account is None else op.device_us for op in ops}
    part, of_part = (OPERATORS, "the time in operators") if scene.account is None else (COMPUTE, "the compute time")
    inside = min(sum(us.values()) / max(length(scene.parts[part]), 1e-9), 1.0)  # kernels of two streams overlap
    if inside < MATTERS:
        return
    sizes = [(f"{p.m} × {p.k} × {p.n}", us[op]) for op, p in ops.items()]
    dearest = totals(sizes)[0][0]
    of_dearest = [op for op, (size, _) in zip(ops, sizes, strict=True) if size == dearest]
    rate, slowest = (sum(ops[op].operations for op in of) / sum(us[op] for op in of) / 1e6 for of in (ops, of_dearest))
    limit, of_what = _limit(scene, list(ops))
    text = f"matrix products take {inside:.0%} of {of_part} at {rate:.3g} TFLOP/s"
    text += f", {rate / limit:.0%} of {of_what}" if limit else ""
    text += f"; those that take most, {dearest}, are computed at {slowest:.3g}"
    if scene.account is not None:
        elementwise = length(scene.kernels(kernels_that(scene.trace, "elementwise"))) / length(scene.parts[COMPUTE])
        text = f"the device computes {scene.shares[COMPUTE]:.0%} of the time, its utilisation; {text}; elementwise and "
        text += f"copying kernels, which memory bounds, take {elementwise:.0%}"
    yield Note(RATE, text)


def _limit(scene: Scene, ops: list[Event]) -> tuple[float, str]:
    """The TFLOP/s of large products on this device, if they are known, and what they are."""
    if scene.account is None:
        tflops = scene.trace.about.get("bf16_speedup", {}).get(TFLOPS, 0.0)
        return tflops, f"what a layer of 1,024 reaches in fp32 on this CPU ({tflops:.3g})"
    kernels = [e for op in ops for e in op.inner() if e.kind == KERNEL]
    kind = totals((product_type(e), e.us) for e in kernels)[0][0] if kernels else ""
    if not kind or (card := likely(scene.trace.device_name)) is None:
        return 0.0, ""
    rates = {_16_BIT_KIND: card.bf16_tflops, _TF32_KIND: card.bf16_tflops / 2, _FP32_KIND: card.fp32_tflops}
    return rates[kind], f"the {rates[kind]:g} of {card.names.partition(';')[0]} in {kind}"


def fp32_products(scene: Scene) -> Iterator[Finding]:
    """Products and convolutions in fp32 or TF32, on a GPU whose tensor cores multiply 16-bit numbers."""
    if scene.account is None or (cases := _cases(scene.trace)) is None:
        return
    kernels = [e for e in kernels_that(scene.trace, "product") if not is_collective(e)]
    products_by_type = {kind: [e for e in kernels if product_type(e) == kind] for kind in (_FP32_KIND, _TF32_KIND)}
    kind, spans = larger({kind: scene.kernels(group) for kind, group in products_by_type.items()})
    group = products_by_type[kind]
    if not group:
        return
    dearest = totals((short_name(e.name), e.us) for e in group)[0][0]
    evidence = f"{scene.each(len(group), 'product')} in {kind}, {scene.time(spans)}, {scene.share(spans):.0%} of "
    evidence += f"the time; most of it in {dearest}{'; TF32 is already on' if kind == _TF32_KIND else ''}"
    where = scene.where([e.parent or e for e in group])
    factor = 0.5 if kind == _TF32_KIND else 0.75
    yield scene.finding("fp32 products", (COMPUTE, spans), where, evidence, ESTIMATE, factor, case=cases[kind])


def _cases(trace: Trace) -> dict[str, str] | None:
    """What the GPU offers instead of fp32, and instead of TF32; None if it has no units for 16-bit products."""
    either = ""
    if not trace.is_amd and trace.capability is None:
        either = "unknown"
    elif not trace.is_amd:
        if trace.capability < (7, 0):
            return None
        if trace.capability >= (8, 0):
            return {_FP32_KIND: "TF32", _TF32_KIND: ""}
        either = "fp16"
    return {_FP32_KIND: either, _TF32_KIND: either}


def short_name(name: str) -> str:
    return re.sub(r"^void |<.*|\(.*", "", name)[:60]


def unfused_chains(scene: Scene) -> Iterator[Finding]:
    """Elementwise kernels, copies and reductions in a row: each reads and writes all of its data."""
    if scene.account is None:
        return
    kernels = kernels_that(scene.trace, "elementwise")
    spans, compute = scene.kernels(kernels), length(scene.account.parts[COMPUTE])
    if not compute or length(spans) < CHAINS_MATTER * compute:
        return
    times = totals((_elementwise_kind(e.name), e.us) for e in kernels)
    by_kind = ", ".join(f"{kind} {milliseconds(scene.per_step(us) / 1e3)}" for kind, us in times)
    evidence = f"{scene.per_step(len(kernels)):.4g} elementwise and copying kernels a step, {scene.time(spans)}, "
    evidence += f"{length(spans) / compute:.0%} of the compute time ({by_kind})"
    where = scene.where([e.parent or e for e in kernels])
    yield scene.finding("unfused elementwise operations", (COMPUTE, spans), where, evidence, ESTIMATE, factor=0.5)


def pairs_by_broadcasting(scene: Scene) -> Iterator[Finding]:
    """Each row of one tensor with each of another, element by element: it writes N × M × D numbers, again and again.

    A product of matrices sums over D as it goes; pairs that aren't summed, a bias and a mask, are none of these. What
    works on as many elements in the forward pass counts, and its backward pass.
    """
    forward = [op for op in scene.trace.ops if op.backward is None]
    summed = {prod(op.shape) for op in forward if op.name in _SUMS} - {0}
    pairs = {op: shape for op in forward if op.name in _OF_TWO and prod(shape := _paired(op)) in summed}
    if not pairs:
        return
    sizes = set(map(prod, pairs.values()))
    ops = [op for op in forward if op in pairs or prod(op.shape) in sizes]
    work = scene.work(scene.trace.with_backward(ops))
    shape = max(pairs.values(), key=prod)
    evidence = f"{scene.each(len(pairs), 'operation')} of all pairs, up to {' × '.join(map(str, shape))} numbers, "
    evidence += f"{scene.time(work[1])} forward and backward"
    yield scene.finding("pairs by broadcasting", work, scene.where(list(pairs)), evidence, ESTIMATE)


def _paired(op: Event) -> list[int]:
    """The shape of the result, where it is that of pairs and far larger than both tensors; else that of nothing."""
    shapes = op.dims[:2]
    if len(shapes) < 2 or not 3 <= len(shapes[0]) == len(shapes[1]):
        return [0]
    shape = [max(sides) for sides in zip(*shapes, strict=True)]
    return shape if prod(shape) >= max(PAIRS * max(map(prod, shapes)), LEAST_PAIRED) else [0]


def _elementwise_kind(kernel: str) -> str:
    return "copies" if "copy" in kernel else "concatenations" if "CatArray" in kernel else "others"


def dense_flex_attention(scene: Scene) -> Iterator[Finding]:
    """flex_attention that isn't compiled computes all scores, also those that its mask leaves out."""
    calls = [e for e in scene.trace.host if e.kind == PYTHON and _FLEX.search(e.name)]
    calls = [e for e in calls if scene.trace.step_of(e) is not None]
    if calls:
        work = scene.work([e for call in calls for e in call.inner()])
        evidence = f"{scene.each(len(calls), 'call')} of flex_attention's dense implementation, {scene.time(work[1])}"
        yield scene.finding("uncompiled flex_attention", work, scene.where(calls), evidence, ESTIMATE)


def masked_attention(scene: Scene) -> Iterator[Finding]:
    """Attention with a mask as a tensor, in 16 bits on a GPU: the flash kernel takes none."""
    ops = [op for op in scene.trace.ops if op.name in _MASKED and op.backward is None and len(op.dims) > 3]
    ops = [op for op in ops if op.dims[3] and op.types[0] in ("c10::BFloat16", "c10::Half")]
    if scene.account and ops:
        work = (COMPUTE, scene.kernels(scene.trace.with_backward(ops)))
        evidence = f"{scene.each(len(ops), 'call')} with a mask of {' × '.join(map(str, ops[0].dims[3]))}, "
        evidence += f"{scene.time(work[1])} forward and backward"
        yield scene.finding("attention with a mask", work, scene.where(ops), evidence, ESTIMATE, factor=0.5)


def handmade_attention(scene: Scene, factor: float = 1.0, whole: bool = False) -> Iterator[Finding]:
    """softmax(QKᵀ)V in separate ops writes the T × T weights to memory several times, forward and backward.

    `factor` is what could go of the ops between the two products, or of the `whole` with them.
    """
    trace = scene.trace
    products_of = {
        softmax: (first, last) for first, softmax, last in attentions(trace) if trace.on_gpu or not _by_sdpa(softmax)
    }
    if not products_of:
        return
    ops = [op for pair in products_of.values() for op in between(trace, *pair) + list(pair if whole else ())]
    what = "all of it" if whole else "what runs between the two products"
    evidence = f"{scene.per_step(len(products_of)):.4g} times a step; {what}, both ways"
    case = "slow path" if all(map(_by_sdpa, products_of)) else ""
    work, where = scene.work(trace.with_backward(ops)), scene.where(list(products_of))
    yield scene.finding("attention from matmul and softmax", work, where, evidence, ESTIMATE, factor, case=case)


def _by_sdpa(op: Event) -> bool:
    return op.within("aten::_scaled_dot_product_attention_math")


def attentions(trace: Trace) -> Iterator[tuple[Event, Event, Event]]:
    """(product, softmax, product) in the forward pass, where the shapes show that each feeds the next."""
    batched = {p.op: p for p in products(trace) if p.op.name in _BATCHED}
    last: Product | None = None
    weights: tuple[Event, Event] | None = None
    for op in trace.ops:
        if op in batched:
            after = batched[op]
            if weights and _shape(weights[1]) == (after.batch, after.m, after.k):
                yield *weights, op
            last, weights = after, None
        elif op.name in _SOFTMAX and last and _shape(op) == (last.batch, last.m, last.n):
            weights = (last.op, op)


def _shape(op: Event) -> tuple[int, ...] | None:
    """(matrices, rows, columns) of an op's first input."""
    return (prod(op.shape[:-2]), *op.shape[-2:]) if len(op.shape) > 2 else None


def between(trace: Trace, first: Event, last: Event) -> list[Event]:
    """The outermost ops between two ops of one thread."""
    start, stop = (bisect_left(trace.ops, time, key=lambda op: op.begin) for time in (first.end, last.begin))
    ops = [op for op in trace.ops[start:stop] if op.track == first.track and op.end <= last.begin]
    chosen = set(ops)
    return [op for op in ops if not any(outer in chosen for outer in op.outer())]


DETAILED_RULES = (
    unaligned_sizes, fp32_products, unfused_chains, pairs_by_broadcasting, dense_flex_attention, masked_attention,
)  # fmt: skip
