"""Chapter 6: how data reaches a model: formats, loaders, decoders, metrics, and the choice of data."""

from .forgetting import ForgettingTracker
from .formats import FORMATS, FormatError, Sample, Stream

__all__ = ["FORMATS", "ForgettingTracker", "FormatError", "Sample", "Stream"]
