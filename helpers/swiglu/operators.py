"""The two steps as operators that torch.compile doesn't look into.

A compiler that saw the products inside would merge level 1's second xW with the first, and keep what the level promises
not to keep. The price: nothing is fused into them, and backward overwrites nothing it was given (two more tensors of
xW's size for a moment).
"""

import torch
from torch import Tensor

from . import elementwise, steps
from .steps import KEEP_8BIT, KEEP_ALL, KEEP_TWO

OPERATORS = __name__.partition(".")[0]  # the package has two names, which share no operator
# Written out, as torch 2.6 doesn't read `list[Tensor]`.
FORWARD = "(Tensor x, Tensor W, Tensor V, Tensor U, SymInt level) -> Tensor[]"
BACKWARD = (
    "(Tensor l, Tensor? x, Tensor? W, Tensor? V, Tensor? U, Tensor[] saved, SymInt level, bool[] needs, "
    "SymInt[] x_shape, SymInt intermediate) -> Tensor[]"
)


@torch.library.custom_op(f"{OPERATORS}_swiglu::forward", mutates_args=(), schema=FORWARD)
def opaque_forward(x: Tensor, W: Tensor, V: Tensor, U: Tensor, level: int) -> list[Tensor]:
    """The output, then what is saved."""
    y, saved = steps.forward(x, W, V, U, level)
    return [y, *saved]


@opaque_forward.register_fake
def _(x: Tensor, W: Tensor, V: Tensor, U: Tensor, level: int) -> list[Tensor]:
    y = x.new_empty((*x.shape[:-1], U.shape[1]))
    hidden = (x.numel() // x.shape[-1], W.shape[1])
    if level in (KEEP_ALL, KEEP_TWO):
        return [y] + [x.new_empty(hidden) for _ in range(3 if level == KEEP_ALL else 2)]
    if level == KEEP_8BIT:
        scales = (elementwise.groups(hidden[0] * hidden[1]),)
        packed = [x.new_empty(hidden, dtype=torch.int8) for _ in range(2)]
        return [y, *packed, *(x.new_empty(scales, dtype=torch.float32) for _ in range(2))]
    return [y]


@torch.library.custom_op(f"{OPERATORS}_swiglu::backward", mutates_args=(), schema=BACKWARD)
def opaque_backward(
    l: Tensor,
    x: Tensor | None,
    W: Tensor | None,
    V: Tensor | None,
    U: Tensor | None,
    saved: list[Tensor],
    level: int,
    needs: list[bool],
    x_shape: list[int],
    intermediate: int,
) -> list[Tensor]:
    """The gradients that are needed, in the order x, W, V, U."""
    return [grad for grad in steps.backward(l, x, W, V, U, saved, level, needs, x_shape) if grad is not None]


@opaque_backward.register_fake
def _(l, x, W, V, U, saved, level, needs, x_shape, intermediate) -> list[Tensor]:
    hidden = x_shape[-1]
    shapes = [x_shape, (hidden, intermediate), (hidden, intermediate), (intermediate, l.shape[-1])]
    return [l.new_empty(shape) for shape, needed in zip(shapes, needs, strict=True) if needed]
