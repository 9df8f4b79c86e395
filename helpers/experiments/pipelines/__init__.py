"""What chapter 6 measures: loaders, decoders, metrics, formats, samples left out, and the speed of Python loops."""

from .decoder_speed import decoding
from .format_speed import formats
from .idle_device import loader
from .metric_cost import metrics_cost
from .python_loops import jit
from .selection import forgetting
