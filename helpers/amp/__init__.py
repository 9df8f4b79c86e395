"""Mixed precision from scratch: loss scaling that never waits for the GPU, and autocast."""

from .autocast import Autocast
from .dynamic_scaler import DynamicGradScaler
from .scaler import StaticGradScaler

__all__ = ["Autocast", "DynamicGradScaler", "StaticGradScaler"]
