"""Checks of a layer's gradients and saved tensors."""

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ..memory import saved_bytes
from .check import Check, close, name_of


def swiglu(function: Any, levels: Sequence[int] = (0, 1), tolerance: float = 1e-4) -> Check:
    """A `torch.autograd.Function` (or a callable) of (x, W, V, U, level), against autograd of the plain formula.

    W and V are (d, I), U is (I, d). Level 0 may save xW, SiLU(xW) and xV, level 1 nothing but x; other levels are
    checked for their output and gradients.
    """
    check = Check(name_of(function))
    apply = getattr(function, "apply", function)
    d, intermediate = 8, 24
    shapes = ((d, intermediate), (d, intermediate), (intermediate, d))

    def inputs(dtype: torch.dtype, *leading: int) -> list[Tensor]:
        generator = torch.Generator().manual_seed(0)
        sizes = ((*leading, d), *shapes)
        return [torch.randn(s, generator=generator, dtype=dtype).requires_grad_() for s in sizes]

    def plain(x: Tensor, W: Tensor, V: Tensor, U: Tensor) -> Tensor:
        return (F.silu(x @ W) * (x @ V)) @ U

    def output(level: int) -> tuple[bool, str]:
        tensors = inputs(torch.float32, 3, 7)
        return close([apply(*tensors, level)], [plain(*tensors)], tolerance)

    def gradient(level: int, place: int) -> tuple[bool, str]:
        tensors = inputs(torch.float32, 3, 7)
        l = torch.randn(3, 7, d, generator=torch.Generator().manual_seed(1))
        ours, plains = (torch.autograd.grad(y, tensors[place], l) for y in (apply(*tensors, level), plain(*tensors)))
        return close(ours, plains, tolerance)

    def derivatives(level: int) -> bool:
        return torch.autograd.gradcheck(lambda *tensors: apply(*tensors, level), inputs(torch.float64, 2))

    def saved(level: int, allowed: int) -> tuple[bool, str]:
        x, *weights = inputs(torch.float32, 50)
        counted = saved_bytes(lambda: apply(x, *weights, level), without=weights)
        return counted <= allowed, f"{counted:,} bytes, at most {allowed:,}"

    for level in levels:
        check.holds(f"level {level}: the output is (SiLU(xW) ⊙ xV) U, for x (3, 7, d)", partial(output, level))
        for place, name in enumerate("xWVU"):
            check.holds(f"level {level}: the gradient of {name} is autograd's", partial(gradient, level, place))
        if tolerance <= 1e-4:
            check.holds(f"level {level}: gradcheck in fp64", partial(derivatives, level))
        if level < 2:
            what, tensors_of_xW = (("x, xW, SiLU(xW), xV", 3), ("x alone", 0))[level]
            check.holds(
                f"level {level} saves {what}", partial(saved, level, 50 * (d + tensors_of_xW * intermediate) * 4)
            )
    return check
