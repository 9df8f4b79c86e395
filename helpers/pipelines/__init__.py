"""Chapter 6: input pipelines, data selection, and the speed of Python loops.

formats/, format_speed    samples on disk in five formats: writing, reading, sharding; and their speed
samples, decoders         generated JPEGs and texts; JPEG decoding by several libraries
loader, metric_cost       idle time of the device because of the loader, and because of metrics
forgetting, selection     which samples a network forgets; accuracy after leaving some out
jit                       Python loops by the interpreter, numba and numpy
"""

from .forgetting import ForgettingTracker
from .formats import FORMATS, FormatError, Sample, Stream

__all__ = ["FORMATS", "ForgettingTracker", "FormatError", "Sample", "Stream"]
