"""Chapter 1's tables, a file each."""

from .exponents import exponents  # isort: skip
from .gradient_time import gradient_time  # isort: skip
from .scaler_step import scaler_step  # isort: skip
from .quality import curves, quality  # isort: skip
