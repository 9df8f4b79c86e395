"""Chapter 7: compilers: what they capture, what they fuse, and how fast what they make of a model is."""

from .backends import WAYS, build, obstacle
from .fusion import measure_fusion
from .graphs import show
from .latency import measure_latency
from .semantics import measure_semantics

__all__ = ["WAYS", "build", "measure_fusion", "measure_latency", "measure_semantics", "obstacle", "show"]
