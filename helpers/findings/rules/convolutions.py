"""Convolutions: kernels of the slow path, the algorithms that cuDNN may choose, and conversions of layout."""

import re
from collections.abc import Iterator
from math import prod

from ..account import COMPUTE
from ..scene import Scene
from ..summary import ESTIMATE, MEASURED, Finding
from ..trace import Event, Trace
from .products import kernels_that, short_name

# Where aten::_convolution has its flags: …, groups, benchmark, deterministic, cudnn_enabled, allow_tf32
_BENCHMARK, _DETERMINISTIC = 9, 10
_SLOW = re.compile(r"aten::(_slow_conv2d_forward|slow_conv_dilated[23]d|slow_conv3d_forward|slow_conv_transpose[23]d)")
SMALL = 20_480  # elements of a single image: on a CPU torch itself chooses the slow path up to this


def layout_conversions(scene: Scene) -> Iterator[Finding]:
    """cuDNN's conversions between NCHW and NHWC around convolutions."""
    if scene.account is None or not (kernels := kernels_that(scene.trace, "layout")):
        return
    spans = scene.kernels(kernels)
    where = scene.where([e.parent or e for e in kernels])
    evidence = f"{scene.per_step(len(kernels)):.4g} kernels a step, {scene.time(spans)}: {short_name(kernels[0].name)}"
    yield scene.finding("layout conversions", (COMPUTE, spans), where, evidence, MEASURED)


def deterministic_convolutions(scene: Scene) -> Iterator[Finding]:
    """cuDNN has fewer deterministic algorithms, and slower ones, mostly for the backward pass."""
    convolutions = deterministic(scene.trace)
    if convolutions and scene.account:
        yield _by_algorithm(scene, "deterministic cuDNN", convolutions)


def deterministic(trace: Trace) -> list[Event]:
    return [op for op in _convolutions(trace) if _flag(op, _DETERMINISTIC)]


def unbenchmarked_convolutions(scene: Scene) -> Iterator[Finding]:
    """cuDNN picks algorithms by heuristics though sizes repeat and one benchmark would pay. Only from a GPU's trace."""
    if not scene.trace.on_gpu:
        return
    chosen = [op for op in _convolutions(scene.trace) if op.dims and op.values and not _flag(op, _BENCHMARK)]
    chosen = [op for op in chosen if not _flag(op, _DETERMINISTIC)]
    sizes = {str(op.dims[:2]) for op in chosen}
    if chosen and len(sizes) * len(scene.trace.steps) <= len(chosen):
        yield _by_algorithm(scene, "unbenchmarked cuDNN", chosen)


def slow_convolutions(scene: Scene) -> Iterator[Finding]:
    """Convolutions that torch unfolds into matrices, image by image, as cuDNN or oneDNN don't take them."""
    slow = [op for op in scene.trace.ops if _SLOW.fullmatch(op.name) and op.types and op.backward is None]
    slow = [op for op in slow if op.types[0] != "float" or prod(op.shape) > SMALL or op.shape[0] > 1]
    if not slow:
        return
    work = scene.work(scene.trace.with_backward([_enclosing(op) for op in slow]))
    kind = max(op.types[0] for op in slow)
    case = "fp64" if kind == "double" else "16 bits" if kind.startswith("c10::") else "" if scene.account else "CPU"
    evidence = f"{scene.each(len(slow), 'convolution')} by {', '.join(sorted({op.name for op in slow}))} of {kind}"
    evidence += f", {scene.time(work[1])} forward and backward"
    yield scene.finding("slow convolutions", work, scene.where(slow), evidence, ESTIMATE, factor=0.5, case=case)


def _enclosing(op: Event) -> Event:
    """The op that made the autograd node."""
    return next((outer for outer in op.outer() if outer.name == "aten::convolution"), op)


def _by_algorithm(scene: Scene, name: str, convolutions: list[Event]) -> Finding:
    work = scene.work(scene.trace.with_backward(list(map(_enclosing, convolutions))))
    evidence = f"{scene.each(len(convolutions), 'convolution')}, {scene.time(work[1])} forward and backward"
    evidence += "; what other algorithms take, no profile shows"
    return scene.finding(name, work, scene.where(convolutions), evidence, ESTIMATE, factor=0.3)


def _convolutions(trace: Trace) -> list[Event]:
    return [op for op in trace.ops if op.name == "aten::_convolution" and op.backward is None]


def _flag(op: Event, position: int) -> bool:
    """A boolean argument of the convolution; False if its arguments were not recorded."""
    return op.values[position : position + 1] == ["True"]


RULES = (layout_conversions,)
DETAILED_RULES = (slow_convolutions, deterministic_convolutions, unbenchmarked_convolutions)
