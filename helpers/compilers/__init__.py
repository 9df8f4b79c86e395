"""Chapter 7: compilers: what they capture, the kernels that they generate, and each backend as a function of inputs."""

from .backends import BACKENDS, build, missing_because
from .capture import show
from .semantics import measure_semantics

__all__ = ["BACKENDS", "build", "measure_semantics", "missing_because", "show"]
