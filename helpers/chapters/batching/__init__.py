"""Chapter 2's tables, a file each.

cuDNN's attention is left out of all that is timed on a device, see `without_cudnn_attention`.
"""

from .attention import attention  # isort: skip
from .batch_time import batch_time  # isort: skip
from .throughput import throughput  # isort: skip
from .training import training  # isort: skip
from .padding import padding  # isort: skip
from .sampler_scaling import sampler_scaling  # isort: skip
