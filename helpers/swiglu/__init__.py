"""A SwiGLU feed-forward layer that trains in less memory: what backward needs is a choice, not a given."""

from .function import MemoryOptimizedSwigluMLPFunction
from .layer import MemoryOptimizedSwigluMLP, SwigluMLP
from .steps import LEVELS

__all__ = ["LEVELS", "MemoryOptimizedSwigluMLP", "MemoryOptimizedSwigluMLPFunction", "SwigluMLP"]
