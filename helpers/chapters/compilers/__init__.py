"""Chapter 7's tables, a file each."""

from .fusion import fusion  # isort: skip
from .latency import latency  # isort: skip
from .training import training  # isort: skip
