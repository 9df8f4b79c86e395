"""Our fused Triton kernels, each with a fallback in plain torch where Triton or CUDA is missing.

Bytes that each moves, which is also the lower bound (b = bytes an element):

    rms_norm, layer_norm    2b forward, 3b backward
    rotate                  2b forward, 2b backward
    loss_and_gradient       2b, forward and backward in one
    AdamW                   28 a parameter (fp32)

In a compiled graph the norms and `rotate` are opaque operators, which the compiler doesn't fuse with others.
"""

from .adamw import AdamW
from .cross_entropy import loss_and_gradient
from .norms import layer_norm, rms_norm
from .rope import rotate

__all__ = [
    "AdamW",
    "layer_norm",
    "loss_and_gradient",
    "rms_norm",
    "rotate",
]
