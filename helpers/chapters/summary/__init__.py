"""Chapter 0's tables, a file each, and what they and other chapters' say together."""

from .stages import stages  # isort: skip
from .time_to_loss import time_to_loss  # isort: skip
from .roofline import kernels, roofline  # isort: skip
