"""What chapter 2 measures: what padding costs, what samplers and packers cost, how fast each kind of batches is.

cuDNN's attention is left out of all that is timed on a device, see `without_cudnn_attention`.
"""

from .attention_variants import attention
from .model_times import batch_time, throughput, training
from .samplers_and_packers import packing, padding, sampler_scaling
