"""Chapter 0's tables, a file each."""

from .time_to_loss import time_to_loss

__all__ = ["time_to_loss"]
