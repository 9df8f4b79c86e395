"""Chapter 5's tables, a file each."""

from .without import without  # isort: skip
from .checkpointing import checkpointing  # isort: skip
from .device_time import device_time  # isort: skip
