"""Chapter 7: compilers: what they capture, what they fuse, and the latency of the compiled models."""

from .backends import BACKENDS, build, missing_because
from .capture import show
from .fusion import measure_fusion
from .latency import measure_latency
from .semantics import measure_semantics

__all__ = [
    "BACKENDS",
    "build",
    "measure_fusion",
    "measure_latency",
    "measure_semantics",
    "missing_because",
    "show",
]
