"""Chapter 6: input pipelines, and which samples a training needs.

formats         samples on disk in four formats: reader, and random_access of tar shards and a mapped file
samples         generated JPEGs and texts
decoders        JPEG decoding by several libraries
forgetting      which samples a network forgets
"""

from .forgetting import ForgettingTracker
from .formats import FORMATS, FormatError, Sample

__all__ = ["FORMATS", "ForgettingTracker", "FormatError", "Sample"]
