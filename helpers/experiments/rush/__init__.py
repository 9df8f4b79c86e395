"""Chapter 5's experiments: the ladder's parts one by one, the ladder on one device, and many ranks."""

from .kernels import norms, adam, lecture  # isort: skip
from .steps import ladder, peers  # isort: skip
from .pairs import pairs, allocator  # isort: skip
from .nulls import nulls  # isort: skip
from .ranks import distributed, memory_plan  # isort: skip
