"""Mixed precision from scratch: loss scaling that never waits for the GPU, and autocast."""

from .autocast import Autocast
from .scaler import DynamicGradScaler, StaticGradScaler

__all__ = ["Autocast", "DynamicGradScaler", "StaticGradScaler"]
