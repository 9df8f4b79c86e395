"""Lower bounds on a layer's time: floating-point operations of its matrix products, and bytes of memory traffic.

Operations are 2·m·n·k for a product of (m, k) and (k, n); elementwise operations are not counted. Bytes assume that
each input and parameter is read once, each output is written once, and intermediates stay on the chip. Backward reads
the output's gradient, input and parameters, and writes the gradients of input and parameters. A layer is faster than
`lower_bound_ms` only if its data are in the cache already.
"""

from dataclasses import dataclass
from functools import partial
from math import prod
from typing import Any

import torch
from torch import Tensor, nn


@dataclass(frozen=True)
class Cost:
    flop: int = 0
    bytes: int = 0

    def lower_bound_ms(self, tflops: float, gb_per_s: float) -> float:
        """Milliseconds at the measured rates of matrix products and of memory, whichever takes longer."""
        for name, ceiling in (("tflops", tflops), ("gb_per_s", gb_per_s)):
            if not ceiling > 0:
                raise ValueError(f"{name} is {ceiling}; it must be above 0")
        return max(self.flop / tflops / 1e9, self.bytes / gb_per_s / 1e6)


def cost(module: nn.Module, shape: tuple[int, ...], itemsize: int = 4) -> tuple[Cost, Cost] | None:
    """Forward and backward cost of a call with an input of this shape; None for a type of layer not listed here.

    The input is assumed to need a gradient. Parameters are counted with the same `itemsize`, indices with 8 bytes.
    `nn.MultiheadAttention` attends to itself, or to keys of the shape of its queries.
    """
    size, weights = prod(shape), sum(parameter.numel() for parameter in module.parameters())
    flop, out = 0, size
    if isinstance(module, nn.Linear):
        rows = size // module.in_features
        flop, out = 2 * rows * module.in_features * module.out_features, rows * module.out_features
    elif isinstance(module, nn.Conv2d):
        out = prod(_convolution_shape(module, shape))
        flop = 2 * out * (module.in_channels // module.groups) * prod(module.kernel_size)
    elif isinstance(module, nn.MultiheadAttention):
        length, width = shape[-2 if module.batch_first else 0], shape[-1]
        flop = 2 * size * (4 * width + 2 * length)  # Q, K, V and the output's projection; QKᵀ, and weights times V
    elif isinstance(module, nn.Embedding):
        read, written = size * (8 + itemsize * module.embedding_dim), itemsize * size * module.embedding_dim
        return Cost(0, read + written), Cost(0, 8 * size + written + itemsize * weights)  # the gradient is dense
    elif not isinstance(module, (nn.LayerNorm, nn.GELU, nn.ReLU, nn.SiLU, nn.Softmax)):
        return None
    forward = Cost(flop, itemsize * (size + weights + out))
    return forward, Cost(2 * flop, itemsize * (out + 2 * size + 2 * weights))


def _convolution_shape(module: nn.Conv2d, shape: tuple[int, ...]) -> tuple[int, ...]:
    """The output's shape for an input of shape (B, C, H, W) or (C, H, W)."""
    if module.padding == "same":
        return (*shape[:-3], module.out_channels, *shape[-2:])
    padding = (0, 0) if module.padding == "valid" else module.padding
    steps = zip(shape[-2:], padding, module.dilation, module.kernel_size, module.stride, strict=True)
    sides = (
        (side + 2 * pad - dilation * (kernel - 1) - 1) // stride + 1 for side, pad, dilation, kernel, stride in steps
    )
    return (*shape[:-3], module.out_channels, *sides)


class CalledLayers:
    """The layers of a model that are called in training, each with the shape of its first input."""

    def __init__(self, model: nn.Module, name: str) -> None:
        self.called: dict[str, tuple[nn.Module, tuple[int, ...]]] = {}
        for path, module in model.named_modules():
            if not list(module.children()):
                module.register_forward_pre_hook(partial(self._note, f"{name}.{path}"))

    def _note(self, path: str, module: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        if torch.is_grad_enabled() and path not in self.called:
            self.called[path] = module, tuple(inputs[0].shape)

    def lower_bounds(self, itemsize: int, tflops: float, gb_per_s: float) -> dict[str, dict[str, Any]]:
        """Operations, bytes and the lower bound on the time of each layer that `cost` knows, forward and backward."""
        bounds = {}
        for path, (module, shape) in self.called.items():
            if (costs := cost(module, shape, itemsize)) is not None:
                bounds[path] = {
                    "gflop": sum(c.flop for c in costs) / 1e9,
                    "moved_mib": sum(c.bytes for c in costs) / 2**20,
                    "lower_bound_ms": sum(c.lower_bound_ms(tflops, gb_per_s) for c in costs),
                }
        return bounds
