"""Chapter 6: how data reaches a model, and which of it is needed.

formats/, format_speed    samples on disk in five formats: written, read, shared out; and how fast each is
samples, decoders         the JPEGs and texts that are measured; JPEG to pixels by several libraries
loader, metric_cost       does the device wait for data? for the metric?
forgetting, selection     which samples a network forgets; what leaving some out costs
jit, jit_loops            loops of Python by an interpreter and by compilers
"""

from .forgetting import ForgettingTracker
from .formats import FORMATS, FormatError, Sample, Stream

__all__ = ["FORMATS", "ForgettingTracker", "FormatError", "Sample", "Stream"]
