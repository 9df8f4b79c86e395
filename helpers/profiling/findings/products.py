"""Matrix products and convolutions: their sizes, type and settings, and products that together are attention.

A product of an (m × k) by a (k × n) matrix is read from the shapes that `record_shapes=True` records. m counts rows
(batch × tokens) and may be anything; k and n are the row strides of the operands and of the result, so they decide
whether the tensor cores can load rows in 16-byte pieces.
"""

import re
from bisect import bisect_left
from collections.abc import Iterator
from dataclasses import dataclass
from math import prod

from ..trace import KERNEL, Event, Trace, by_source_line, source_lines
from . import ATTENTION, DETERMINISTIC, FP32, UNALIGNED, UNBENCHMARKED, Finding

ALIGNED_TO = {"c10::Half": 8, "c10::BFloat16": 8, "float": 4}  # elements in 16 bytes
SMALL = 16  # sizes up to this are given by the task (classes, features)
MATTERS = 0.05  # of the operations of all products, or of their time: less is not reported

_MATRICES = {"aten::mm": (0, 1), "aten::addmm": (1, 2), "aten::bmm": (0, 1), "aten::baddbmm": (1, 2)}
_CONVOLUTIONS = {"aten::cudnn_convolution", "aten::convolution_overrideable", "aten::_conv_depthwise2d"}
_TF32 = re.compile(r"tf32|s1688|tensorop_s\d", re.IGNORECASE)
# Where aten::_convolution has its flags: …, groups, benchmark, deterministic, cudnn_enabled, allow_tf32
_BENCHMARK, _DETERMINISTIC = 9, 10
SETTINGS_MATTER = 0.02  # of the kernels' time, for the convolutions of one source line
_BATCHED = {"aten::bmm", "aten::baddbmm"}
_SOFTMAX = {"aten::_softmax", "aten::_safe_softmax"}


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
    candidates = (_product(op) for op in trace.ops if op.name in _MATRICES and op.backward is None)
    return [product for product in candidates if product is not None]


def _product(op: Event) -> Product | None:
    """None where the shapes aren't recorded."""
    operands = _MATRICES[op.name]
    if len(op.dims) <= max(operands):
        return None
    left, right = (op.dims[i] for i in operands)
    if len(left) not in (2, 3) or len(left) != len(right) or not all(isinstance(d, int) for d in left + right):
        return None
    dtype = op.types[operands[0]] if len(op.types) > operands[0] else ""
    return Product(op, prod(left[:-2]), left[-2], left[-1], right[-1], dtype)


def unaligned_sizes(trace: Trace) -> Iterator[Finding]:
    """Rows of 255 or 1023 elements don't begin at multiples of 16 bytes: the fast kernels can't be used."""
    attention = {op for trio in _attentions(trace) for op in trio}
    all_products = products(trace)
    total = sum(p.operations for p in all_products)
    product_of = {p.op: p for p in all_products if _unaligned(p) and p.op not in attention}
    for group in by_source_line(trace, list(product_of)).values():
        if sum(product_of[op].operations for op in group) < MATTERS * total:
            continue
        sizes = sorted({size for op in group for size in _unaligned(product_of[op])})
        unit = max(ALIGNED_TO[product_of[op].dtype] for op in group)
        yield Finding(
            UNALIGNED,
            f"{source_lines(trace, group)}: {', '.join(map(str, sizes))}",
            trace.per_step(len(group)),
            trace.ms(trace.with_backward(group)) / 2,
            "estimate: half of these products' time, forward and backward; unaligned rows run at half the rate or less",
            f"make the size a multiple of {max(unit, 8)} ({', '.join(f'{s} → {-(-s // 8) * 8}' for s in sizes)})",
        )


def _unaligned(product: Product) -> list[int]:
    """The sizes whose rows don't begin at multiples of 16 bytes."""
    unit = ALIGNED_TO.get(product.dtype)
    return [size for size in (product.k, product.n) if unit and size > SMALL and size % unit]


def fp32_products(trace: Trace) -> Iterator[Finding]:
    """Products and convolutions of fp32 inputs, on a GPU. TF32 counts too: bf16 is twice as fast at half the bytes."""
    if not trace.on_gpu:
        return
    heavy = [op for op in trace.ops if op.name in _MATRICES or op.name in _CONVOLUTIONS]
    heavy = [op for op in heavy if op.backward is None and op.device_us > 0]
    matters = MATTERS * sum(op.device_us for op in heavy)
    for group in by_source_line(trace, [op for op in heavy if "float" in op.types[:3]]).values():
        if sum(op.device_us for op in group) < matters:
            continue
        kernels = sorted({e.name for op in group for e in op.inner() if e.kind == KERNEL})
        tf32 = all(_TF32.search(name) for name in kernels)
        yield Finding(
            FP32,
            source_lines(trace, group),
            trace.per_step(len(group)),
            trace.ms(trace.with_backward(group)) * (0.5 if tf32 else 0.75),
            f"estimate: {'half' if tf32 else 'three quarters'} of their time, both ways; kernel {_short(kernels)}",
            "train under torch.autocast in bf16"
            + ("" if tf32 else '; for TF32 torch.set_float32_matmul_precision("high")'),
        )


def _short(kernels: list[str]) -> str:
    return re.sub(r"^void |<.*|\(.*", "", kernels[0])[:60] if kernels else "unknown"


def handmade_attention(trace: Trace) -> Iterator[Finding]:
    """softmax(QKᵀ)V in separate ops writes the T × T weights to memory several times, forward and backward."""
    products_of = {
        softmax: (first, last) for first, softmax, last in _attentions(trace) if trace.on_gpu or not _by_sdpa(softmax)
    }
    for group in by_source_line(trace, list(products_of)).values():
        ops = [op for softmax in group for op in _between(trace, *products_of[softmax])]
        advice = (
            "scaled_dot_product_attention took its slow path: give it a type, head size and mask that others take"
            if any(map(_by_sdpa, group))
            else "use torch.nn.functional.scaled_dot_product_attention (is_causal=True in place of a causal mask)"
        )
        yield Finding(
            ATTENTION,
            source_lines(trace, group),
            trace.per_step(len(group)),
            trace.ms(trace.with_backward(ops)),
            "estimate: all that runs between the two products, both ways; a fused kernel keeps it on the chip",
            advice,
        )


def _by_sdpa(op: Event) -> bool:
    return op.within("aten::_scaled_dot_product_attention_math")


def _attentions(trace: Trace) -> Iterator[tuple[Event, Event, Event]]:
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


def _between(trace: Trace, first: Event, last: Event) -> list[Event]:
    """The outermost ops between two ops of one thread."""
    start, stop = (bisect_left(trace.ops, time, key=lambda op: op.begin) for time in (first.end, last.begin))
    ops = [op for op in trace.ops[start:stop] if op.track == first.track and op.end <= last.begin]
    chosen = set(ops)
    return [op for op in ops if not any(outer in chosen for outer in op.outer())]


def deterministic_convolutions(trace: Trace) -> Iterator[Finding]:
    """cuDNN has fewer deterministic algorithms, and slower ones, mostly for the backward pass."""
    deterministic = [op for op in _convolutions(trace) if _flag(op, _DETERMINISTIC)]
    for group in by_source_line(trace, deterministic).values():
        yield Finding(
            DETERMINISTIC,
            source_lines(trace, group),
            trace.per_step(len(group)),
            trace.ms(trace.with_backward([_convolution_of(op) for op in group])),
            "at most: these convolutions, forward and backward; what other algorithms take, no trace shows",
            "torch.backends.cudnn.deterministic = False, unless equal bits are the aim",
        )


def unbenchmarked_convolutions(trace: Trace) -> Iterator[Finding]:
    """cuDNN picks algorithms by heuristics though sizes repeat and one benchmark would pay. Only from a GPU's trace."""
    guessed = [
        op
        for op in _convolutions(trace)
        if trace.on_gpu and not _flag(op, _BENCHMARK, unknown=True) and not _flag(op, _DETERMINISTIC)
    ]
    kernels = trace.per_step(sum(e.us for e in trace.device if e.kind == KERNEL)) / 1e3
    for group in by_source_line(trace, guessed).values():
        cost = trace.ms(trace.with_backward([_convolution_of(op) for op in group]))
        sizes = {str(op.dims[:2]) for op in group}
        if cost < SETTINGS_MATTER * kernels or not group[0].dims or len(sizes) * len(trace.steps) > len(group):
            continue
        yield Finding(
            UNBENCHMARKED,
            source_lines(trace, group),
            trace.per_step(len(group)),
            cost,
            "at most: these convolutions, forward and backward; what other algorithms take, no trace shows",
            "torch.backends.cudnn.benchmark = True: sizes repeat from step to step",
        )


def _convolutions(trace: Trace) -> list[Event]:
    return [op for op in trace.ops if op.name == "aten::_convolution" and op.backward is None]


def _convolution_of(op: Event) -> Event:
    """The enclosing op that made the autograd node."""
    return next((outer for outer in op.outer() if outer.name == "aten::convolution"), op)


def _flag(op: Event, position: int, unknown: bool = False) -> bool:
    """A boolean argument of the convolution; `unknown` if its arguments were not recorded."""
    value = op.values[position] if len(op.values) > position else ""
    return value == "True" if value in ("True", "False") else unknown
