"""A SwiGLU feed-forward layer that trains in less memory: what backward needs is a choice, not a given."""

from .function import MemoryOptimizedSwigluMLPFunction
from .levels import LEVELS
from .mlp import MemoryOptimizedSwigluMLP, SwigluMLP

__all__ = ["LEVELS", "MemoryOptimizedSwigluMLP", "MemoryOptimizedSwigluMLPFunction", "SwigluMLP"]
