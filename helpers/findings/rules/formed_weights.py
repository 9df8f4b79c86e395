"""Weights that each forward pass forms anew, of smaller numbers or of other weights, before a product with them.

A trace names no tensors. An op counts as one that forms a weight if it comes right before a layer's product, in one
call of a user's function, and the last such op gets as many elements as that product's weight has. Casts of floats
alone are autocast's, and torch's own parametrizations, such as a spectral norm, are the model's.
"""

from collections import Counter
from collections.abc import Iterator
from itertools import takewhile
from math import prod

from ..source_places import line_or_function, user_frame
from ..trace import Event, Trace, aten
from .needless import VIEWS, outermost

_PRODUCTS, _CONVOLUTIONS = aten("linear matmul mm addmm"), aten("conv1d conv2d conv3d")
_CASTS = aten("to _to_copy type_as")
_FORMING = _CASTS | aten(
    "mul add sub div rsub neg cat stack bitwise_and bitwise_or __rshift__ __lshift__ __and__ bitwise_right_shift "
    "bitwise_left_shift remainder where lerp mm matmul linalg_vector_norm clamp_min expand_as"
)
_INTEGERS = {"signed char", "unsigned char", "short int", "int"}
LEAST = 4096  # elements of a weight
_PARAMETRIZATIONS = "torch/nn/utils/"


def forming_lines(trace: Trace) -> dict[str, float]:
    """The lines that form weights, "train.py:7", or functions, "train.py in weight", and how many a step forms there.

    A function that multiplies by the weight, too, isn't named as a whole.
    """
    counts: Counter[str] = Counter()
    for chain in _chains(outermost(trace)):
        counts.update({line_or_function(trace, op) for op in chain})
    return {line: count / len(trace.steps) for line, count in counts.items() if not line.endswith(" in forward")}


def _chains(ops: list[Event]) -> Iterator[list[Event]]:
    """The ops that form a weight, for each product whose weight is formed."""
    before: list[Event] = []
    for op in ops:
        tensors = [dims for dims in op.dims if dims]
        dims = 4 if op.name in _CONVOLUTIONS else 2
        layer = op.name in _PRODUCTS | _CONVOLUTIONS and len(tensors) > 1 and len(tensors[1]) == dims
        if layer and (chain := _forming(before, prod(tensors[0]), prod(tensors[1]))):
            yield chain
            before = []
        before = [*before, op] if op.name in VIEWS | _FORMING else []


def _forming(before: list[Event], given: int, weight: int) -> list[Event]:
    """Of the ops before a product those that form its weight, the last first; `given` are its input's elements."""
    working = [op for op in before if op.name not in VIEWS or op.name in _CASTS]
    if not working or weight < LEAST or weight == given:
        return []
    sizes = [prod(dims) for dims in _tensors(working[-1])]
    frame = user_frame(working[-1])
    if frame is None or given in sizes or max(sizes, default=0) > weight or sum(sizes) < weight:
        return []
    if any(
        _PARAMETRIZATIONS in outer.name for outer in takewhile(lambda outer: outer is not frame, working[-1].outer())
    ):
        return []
    chain = [op for op in reversed(working) if frame in op.outer()]
    whole = any(kind in _INTEGERS for op in chain for kind in op.types)
    return chain if whole or any(op.name not in _CASTS for op in chain) else []


def _tensors(op: Event) -> Iterator[list[int]]:
    """The shapes of an op's tensors, and of those in its lists."""
    for dims in op.dims:
        if dims and isinstance(dims[0], list):
            yield from dims
        elif dims:
            yield dims
