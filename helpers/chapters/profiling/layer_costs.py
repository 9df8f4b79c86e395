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
        return max(self.flop / tflops / 1e9, self.bytes / gb_per_s / 1e6)


def cost(
    module: nn.Module, inputs: tuple[int, ...], outputs: tuple[int, ...], itemsize: int = 4
) -> tuple[Cost, Cost] | None:
    """Forward and backward cost of a call with an input and an output of these shapes; None for other types of layers.

    The input is assumed to need a gradient. Parameters are counted with the same `itemsize`, indices with 8 bytes.
    """
    size, out, weights = prod(inputs), prod(outputs), sum(parameter.numel() for parameter in module.parameters())
    flop = 0
    if isinstance(module, nn.Linear):
        flop = 2 * size * module.out_features
    elif isinstance(module, nn.Conv2d):
        flop = 2 * out * (module.in_channels // module.groups) * prod(module.kernel_size)
    elif isinstance(module, nn.Embedding):
        read, written = size * 8 + itemsize * out, itemsize * out
        return Cost(0, read + written), Cost(0, read + itemsize * weights)  # the gradient is dense
    elif not isinstance(module, (nn.LayerNorm, nn.GELU, nn.ReLU, nn.SiLU, nn.Softmax)):
        return None
    forward = Cost(flop, itemsize * (size + weights + out))
    return forward, Cost(2 * flop, itemsize * (out + 2 * size + 2 * weights))


class CalledLayers:
    """The layers of a model that are called in training, each with the shapes of its first input and output."""

    def __init__(self, model: nn.Module, name: str) -> None:
        self.called: dict[str, tuple[nn.Module, tuple[int, ...], tuple[int, ...]]] = {}
        for path, module in model.named_modules():
            if not list(module.children()):
                module.register_forward_hook(partial(self._note, f"{name}.{path}"))

    def _note(self, path: str, module: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        if torch.is_grad_enabled() and path not in self.called:
            self.called[path] = module, tuple(inputs[0].shape), tuple(output.shape)

    def lower_bounds(self, itemsize: int, tflops: float, gb_per_s: float) -> dict[str, dict[str, Any]]:
        """Operations, bytes and the lower bound on the time of each layer that `cost` knows, forward and backward."""
        bounds = {}
        for path, (module, inputs, outputs) in self.called.items():
            if (costs := cost(module, inputs, outputs, itemsize)) is not None:
                bounds[path] = {
                    "gflop": sum(c.flop for c in costs) / 1e9,
                    "moved_mib": sum(c.bytes for c in costs) / 2**20,
                    "lower_bound_ms": sum(c.lower_bound_ms(tflops, gb_per_s) for c in costs),
                }
        return bounds
