"""Fused kernels of our own in Triton, each with the same in plain torch for where Triton or CUDA is missing.

What each must at least move, in bytes (b an element), which is what it does move:

    rms_norm, layer_norm    2b forward, 3b backward
    rotate                  2b forward, 2b backward
    loss_and_gradient       2b, forward and backward in one
    AdamW                   28 a parameter (fp32)

In a compiled graph the norms and `rotate` are operators that the compiler doesn't look into, and fuses nothing into.
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
