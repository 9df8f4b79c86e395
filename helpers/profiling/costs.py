"""What a layer must at least cost: operations of its matrix products, and bytes that have to pass the memory.

Operations are 2·m·n·k for a product of (m, k) and (k, n); what is done element by element is not counted. Bytes are
those of a layer that reads each input and each parameter once, writes each output once, and keeps all in between on
the chip. In backward it reads the output's gradient and what its formulas need of input, output and parameters, and
writes the gradients of input and parameters. No layer is faster than `floor_ms` of its cost, unless its data are in the
cache already; how much slower it is says whether a measured time is reasonable.
"""

from dataclasses import dataclass
from functools import partial
from math import prod
from typing import Any

import pandas as pd
from torch import Tensor, nn


@dataclass(frozen=True)
class Cost:
    flop: int = 0
    bytes: int = 0

    def floor_ms(self, tflops: float, gb_per_s: float) -> float:
        """Milliseconds at the measured ceilings of products and of memory, whichever binds."""
        for name, ceiling in (("tflops", tflops), ("gb_per_s", gb_per_s)):
            if not ceiling > 0:
                raise ValueError(f"{name} is {ceiling}; it must be above 0")
        return max(self.flop / tflops / 1e9, self.bytes / gb_per_s / 1e6)


def cost(
    module: nn.Module, shape: tuple[int, ...], itemsize: int = 4, *, input_gradient: bool = True
) -> tuple[Cost, Cost] | None:
    """Forward and backward cost of a call with an input of the shape; None of a layer that this doesn't know.

    `input_gradient=False`: the first layer, whose input needs none. Parameters are counted with the same `itemsize`,
    indices with 8 bytes. `nn.MultiheadAttention` attends to itself, or to keys of the shape of its queries.
    """
    size, weights = prod(shape), sum(parameter.numel() for parameter in module.parameters())
    product, out = 0, size
    if isinstance(module, nn.Linear):
        rows = size // module.in_features
        product, out = 2 * rows * module.in_features * module.out_features, rows * module.out_features
    elif isinstance(module, nn.Conv2d):
        out = prod(_convolved(module, shape))
        product = 2 * out * (module.in_channels // module.groups) * prod(module.kernel_size)
    elif isinstance(module, nn.MultiheadAttention):
        length, width = shape[-2 if module.batch_first else 0], shape[-1]
        product = 2 * size * (4 * width + 2 * length)  # Q, K, V and the output's projection; QKᵀ, and weights times V
    elif isinstance(module, nn.Embedding):
        read, written = size * (8 + itemsize * module.embedding_dim), itemsize * size * module.embedding_dim
        return Cost(0, read + written), Cost(0, 8 * size + written + itemsize * weights)  # the gradient is dense
    elif not isinstance(module, (nn.LayerNorm, nn.GELU, nn.ReLU, nn.SiLU, nn.Softmax)):
        return None
    forward = Cost(product, itemsize * (size + weights + out))
    if input_gradient:
        return forward, Cost(2 * product, itemsize * (out + 2 * size + 2 * weights))
    return forward, Cost(product, itemsize * (out + size + weights)) if weights else Cost()


def attention(
    batch: int, heads: int, queries: int, keys: int, head_dim: int, itemsize: int = 4, *, fused: bool = True
) -> tuple[Cost, Cost]:
    """Softmax(QKᵀ)V on (B, H, T, D): two products forward, four backward, with no discount for a causal mask.

    Fused, the (T, T) weights never leave the chip, and backward computes them again with a fifth product. Else scores
    and weights are written and read, by the products and the softmax between: 4 passes over them, and 7 in backward.
    """
    product = 2 * batch * heads * queries * keys * head_dim
    whole = 2 * batch * heads * (queries + keys) * head_dim * itemsize  # Q and the output, K and V
    weights = batch * heads * queries * keys * itemsize
    if fused:
        return Cost(2 * product, whole), Cost(5 * product, 2 * whole)
    # Forward: scores written, read; weights written, read. Backward: ∂L/∂weights written, read; weights read for
    # ∂L/∂V and by the softmax; ∂L/∂scores written, read for ∂L/∂Q and for ∂L/∂K.
    return Cost(2 * product, whole + 4 * weights), Cost(4 * product, 2 * whole + 7 * weights)


def _convolved(module: nn.Conv2d, shape: tuple[int, ...]) -> tuple[int, ...]:
    """The shape that a convolution makes of (B, C, H, W), or of (C, H, W)."""
    if module.padding == "same":
        return (*shape[:-3], module.out_channels, *shape[-2:])
    padding = (0, 0) if module.padding == "valid" else module.padding
    steps = zip(shape[-2:], padding, module.dilation, module.kernel_size, module.stride, strict=True)
    sides = (
        (side + 2 * pad - dilation * (kernel - 1) - 1) // stride + 1 for side, pad, dilation, kernel, stride in steps
    )
    return (*shape[:-3], module.out_channels, *sides)


def costs(model: nn.Module, *inputs: Tensor, name: str = "model") -> pd.DataFrame:
    """One row for each layer that `cost` knows, summed over its calls in `model(*inputs)`, which is run once.

    `module` is named as in `ModuleProfiler.summary`, so that the two tables can be merged.
    """
    found: dict[str, list[tuple[Cost, Cost]]] = {}

    def note(path: str, module: nn.Module, args: tuple, output: Any) -> None:
        if args and isinstance(args[0], Tensor):
            x = args[0]
            itemsize = module.weight.itemsize if isinstance(module, nn.Embedding) else x.itemsize
            one = cost(module, tuple(x.shape), itemsize, input_gradient=x.requires_grad)
            if one is not None:
                found.setdefault(path, []).append(one)

    named = {(f"{name}.{path}" if path else name): module for path, module in model.named_modules()}
    handles = [module.register_forward_hook(partial(note, path)) for path, module in named.items()]
    try:
        model(*inputs)
    finally:
        for handle in handles:
            handle.remove()
    rows = []
    for path, calls in found.items():
        row = {"module": path}
        for kind, ones in zip(("forward", "backward"), zip(*calls, strict=True), strict=True):
            row |= {f"{kind}_flop": sum(one.flop for one in ones), f"{kind}_bytes": sum(one.bytes for one in ones)}
        rows.append(row)
    return pd.DataFrame(rows)
