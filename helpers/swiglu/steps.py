"""Forward and backward of the layer, step by step, on tensors that are already checked and of one dtype.

    g = xW    u = xV    z = SiLU(g) ⊙ u    y = zU                                   3 matrix products

With l = ∂L/∂y, and σ the logistic function:

    ∂L/∂z = l Uᵀ
    ∂L/∂g = ∂L/∂z ⊙ u ⊙ σ(g) (1 + g (1 − σ(g)))       ∂L/∂u = ∂L/∂z ⊙ SiLU(g)
    ∂L/∂U = zᵀ l     ∂L/∂W = xᵀ ∂L/∂g     ∂L/∂V = xᵀ ∂L/∂u
    ∂L/∂x = ∂L/∂g Wᵀ + ∂L/∂u Vᵀ                                                     6 matrix products

Level 1 adds two products, to compute g and u again. What nobody asks a gradient of is not computed.

`opaque_forward` and `opaque_backward` are both steps as operators that torch.compile doesn't look into. A compiler that
saw the products inside would merge level 1's second xW with the first, and keep what the level promises not to keep.
The price: nothing is fused into them, and backward overwrites nothing it was given (two more tensors of xW's size for a
moment).
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from . import elementwise

# What a layer keeps for backward, besides its weights.
KEEP_ALL, KEEP_INPUT, KEEP_TWO, KEEP_8BIT = 0, 1, 2, 3
LEVELS = {KEEP_ALL: "x, xW, SiLU(xW), xV", KEEP_INPUT: "x", KEEP_TWO: "x, xW, xV", KEEP_8BIT: "x, xW and xV in 8 bits"}

TRITON_DTYPES = (torch.float16, torch.bfloat16, torch.float32)
OPERATORS = __name__.partition(".")[0]  # the package has two names, which share no operator
# Written out, as torch 2.6 doesn't read `list[Tensor]`.
FORWARD = "(Tensor x, Tensor W, Tensor V, Tensor U, SymInt level) -> Tensor[]"
BACKWARD = (
    "(Tensor l, Tensor? x, Tensor? W, Tensor? V, Tensor? U, Tensor[] saved, SymInt level, bool[] needs, "
    "SymInt[] x_shape, SymInt intermediate) -> Tensor[]"
)


def kernels_for(tensor: Tensor):
    """The module with the elementwise parts for this tensor: Triton's on a GPU that has it, else plain torch's."""
    if tensor.is_cuda and tensor.dtype in TRITON_DTYPES:
        try:
            from . import triton_kernels
        except ImportError:  # a CUDA build of torch without Triton (Windows)
            return elementwise
        return triton_kernels
    return elementwise


def forward(x: Tensor, W: Tensor, V: Tensor, U: Tensor, level: int) -> tuple[Tensor, list[Tensor]]:
    """The output, and what `level` keeps besides x and the weights."""
    rows = x.reshape(-1, x.shape[-1])  # (T, d)
    kernels = kernels_for(rows)
    g, u = rows @ W, rows @ V  # (T, I)
    # Selective checkpointing watches by a dispatch mode and may hold g: then nothing is written over it.
    alone = torch._C._len_torch_dispatch_stack() == 0
    if level == KEEP_ALL:
        s, z = kernels.activate_keeping(g, u)
        saved = [g, u, s]
    elif level == KEEP_INPUT:
        z, saved = kernels.activate(g, u, overwrite=alone), []
    elif level == KEEP_TWO:
        z, saved = kernels.activate(g, u), [g, u]
    else:
        z, saved = kernels.activate_packing(g, u, overwrite=alone)
    del g, u
    # The product of z in x's shape, as that of z in two dimensions would have to be viewed, and a view that a function
    # returns can't be changed in place.
    return z.view(*x.shape[:-1], U.shape[0]) @ U, saved


def backward(
    l: Tensor,
    x: Tensor | None,
    W: Tensor | None,
    V: Tensor | None,
    U: Tensor | None,
    saved: list[Tensor],
    level: int,
    needs: list[bool],
    x_shape: Sequence[int],
    overwrite: bool = False,
    transposed: bool = False,
) -> list[Tensor | None]:
    """The gradients of x, W, V, U that are needed (`needs`), None for the others.

    `overwrite`: nobody will look at `saved` again, so gradients may be written over it. `transposed`: the weights are
    views of a Linear's, and their gradients get that layout, which autograd would copy them to. Every product is freed
    as soon as the next one is there: at the peak there are three tensors of z's size and one weight gradient,
    or two and three.
    """
    need_x, need_W, need_V, need_U = needs
    rows = None if x is None else x.reshape(-1, x.shape[-1])  # (T, d)
    l = l.reshape(-1, l.shape[-1])  # (T, d)
    if level == KEEP_INPUT:
        saved, overwrite = [rows @ W, rows @ V], True
    dx = dW = dV = dU = None
    # (T, I); where U alone learns, U isn't saved, and of what follows z alone is needed
    dz = torch.zeros_like(saved[0], dtype=l.dtype) if U is None else l @ U.t()
    dg, du, z = _elementwise(dz, saved, level, overwrite)
    del dz  # z may be written over it
    if overwrite and level != KEEP_INPUT:
        torch.autograd.graph.increment_version(saved)  # whoever still holds them and needs them is told
    del saved
    if need_U:
        dU = _weight_gradient(z, l, transposed)
    del z
    if need_W:
        dW = _weight_gradient(rows, dg, transposed)
    if need_V:
        dV = _weight_gradient(rows, du, transposed)
    if need_x:
        dx = dg @ W.t()
        dx = torch.addmm(dx, du, V.t(), out=dx).view(x_shape)
    return [dx, dW, dV, dU]


def _weight_gradient(inputs: Tensor, l: Tensor, transposed: bool) -> Tensor:
    return (l.t() @ inputs).t() if transposed else inputs.t() @ l


def _elementwise(dz: Tensor, saved: list[Tensor], level: int, overwrite: bool) -> tuple[Tensor, Tensor, Tensor]:
    kernels = kernels_for(dz)
    if level == KEEP_8BIT:
        return kernels.differentiate_packed(dz, saved)
    g, u, *s = saved
    return kernels.differentiate(dz, g, u, overwrite, *s)


@torch.library.custom_op(f"{OPERATORS}_swiglu::forward", mutates_args=(), schema=FORWARD)
def opaque_forward(x: Tensor, W: Tensor, V: Tensor, U: Tensor, level: int) -> list[Tensor]:
    """The output, then what is saved."""
    y, saved = forward(x, W, V, U, level)
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
    return [grad for grad in backward(l, x, W, V, U, saved, level, needs, x_shape) if grad is not None]


@opaque_backward.register_fake
def _(l, x, W, V, U, saved, level, needs, x_shape, intermediate) -> list[Tensor]:
    hidden = x_shape[-1]
    shapes = [x_shape, (hidden, intermediate), (hidden, intermediate), (intermediate, l.shape[-1])]
    return [l.new_empty(shape) for shape, needed in zip(shapes, needs, strict=True) if needed]
