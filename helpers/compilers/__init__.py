"""Chapter 7: compilers: what they capture, the kernels that they generate, and each backend as a function of inputs."""

from .backends import BACKENDS, build, missing_because
from .capture import show

__all__ = ["BACKENDS", "build", "missing_because", "show"]
