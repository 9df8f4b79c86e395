"""Chapter 6's tables, a file each."""

from .formats import formats  # isort: skip
from .loader import loader  # isort: skip
from .metrics_cost import metrics_cost  # isort: skip
from .jit import jit  # isort: skip
from .forgetting import forgetting  # isort: skip
