"""LayerNorm and RMSNorm as Triton kernels, plain torch where Triton or CUDA is missing; and swapping a model's norms.

In a compiled graph our norms are opaque operators, which the compiler doesn't fuse with others.
"""

from .norms import add_rms_norm, layer_norm, rms_norm
from .swaps import LayerNorm, RMSNorm, swap_norms

__all__ = ["LayerNorm", "RMSNorm", "add_rms_norm", "layer_norm", "rms_norm", "swap_norms"]
