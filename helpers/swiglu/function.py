"""The autograd function of the layer: which tensors it saves, casting, and what it refuses."""

import numbers

import torch
import torch.nn.functional as F
from torch import Tensor

from ..lab.precision import autocast_dtype, without_autocast
from . import steps
from .steps import KEEP_INPUT, KEEP_TWO, LEVELS, opaque_backward, opaque_forward

TWICE = "MemoryOptimizedSwigluMLP: double backward isn't supported; use SwigluMLP for it"
DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


class MemoryOptimizedSwigluMLPFunction(torch.autograd.Function):
    """SwiGLU, (SiLU(xW) ⊙ xV) U, with a choice of what is saved for backward.

    Bytes saved a token, with d = hidden, I = intermediate size and b = bytes an element, and the matrix
    products of forward + backward; a plain module keeps (4I + d) b and needs 3 + 6:

        level 0   (3I + d) b          3 + 6
        level 1   d b                 3 + 8
        level 2   (2I + d) b          3 + 6
        level 3   2I (1 + 4/128) + d b    3 + 6, gradients from activations rounded to 8 bits

    Under autocast the products run in autocast's type; the weights are saved as they are and cast again in
    backward, which costs one pass over them and saves a copy. On a GPU, backward writes gradients over what was saved
    unless the graph is retained: tensors taken from `saved_tensors` or from a pack hook don't outlive it.

    Second derivatives are refused, and torch.func's transforms: `SwigluMLP` has them.
    """

    @staticmethod
    def forward(ctx, x: Tensor, W: Tensor, V: Tensor, U: Tensor, checkpoint_level: int = KEEP_TWO) -> Tensor:
        level = check_level(checkpoint_level)
        asked = autocast_dtype(x)
        check_arguments(x, W, V, U, casting=asked is not None)
        dtype = asked or x.dtype
        needs = list(ctx.needs_input_grad[:4])
        if not any(needs):
            level = KEEP_INPUT  # nothing has to be saved
        x_cast = _cast(x, dtype)
        with without_autocast(x):
            y, *saved = _forward(x_cast, _cast(W, dtype), _cast(V, dtype), _cast(U, dtype), level)
        need_x, need_W, need_V, _ = needs
        again = level == KEEP_INPUT and any(needs)
        ctx.save_for_backward(
            x_cast if need_W or need_V or again else None,
            W if need_x or again else None,
            V if need_x or again else None,
            U if need_x or need_W or need_V else None,
            *saved,
        )
        ctx.level, ctx.dtype, ctx.dtypes = level, dtype, (x.dtype, W.dtype, V.dtype, U.dtype)
        ctx.x_shape, ctx.intermediate, ctx.transposed = x.shape, W.shape[1], not W.is_contiguous()
        return y

    @staticmethod
    def backward(ctx, l: Tensor) -> tuple[Tensor | None, ...]:
        saved, needs = ctx.saved_tensors, list(ctx.needs_input_grad[:4])
        x, *weights = [_cast(tensor, ctx.dtype) for tensor in saved[:4]]
        with torch.no_grad(), without_autocast(l):
            arguments = (_cast(l, ctx.dtype), x, *weights, list(saved[4:]), ctx.level, needs)
            shapes = {"x_shape": ctx.x_shape, "intermediate": ctx.intermediate, "transposed": ctx.transposed}
            grads = _backward(*arguments, **shapes)
        grads = [_cast(grad, dtype) for grad, dtype in zip(grads, ctx.dtypes, strict=True)]
        if torch.is_grad_enabled() and not torch.compiler.is_compiling():  # as `once_differentiable`, for any l
            refuse = torch._C._functions.DelayedError(TWICE, len(grads))
            grads = refuse(*(None if grad is None else grad.detach().requires_grad_() for grad in grads))
        return *grads, None


def plain(x: Tensor, W: Tensor, V: Tensor, U: Tensor) -> Tensor:
    return (F.silu(x @ W) * (x @ V)) @ U


def _forward(x: Tensor, W: Tensor, V: Tensor, U: Tensor, level: int) -> list[Tensor]:
    if torch.compiler.is_compiling():
        return opaque_forward(x, W, V, U, level)
    y, saved = steps.forward(x, W, V, U, level)
    return [y, *saved]


def _backward(l, x, W, V, U, saved, level, needs, *, x_shape, intermediate, transposed) -> list[Tensor | None]:
    if torch.compiler.is_compiling():
        gradients = opaque_backward(l, x, W, V, U, saved, level, needs, list(x_shape), intermediate)
        remaining = iter(gradients)
        return [next(remaining) if needed else None for needed in needs]
    overwrite = not torch._C._autograd._get_current_graph_task_keep_graph()  # else backward may come again
    return steps.backward(l, x, W, V, U, saved, level, needs, x_shape, overwrite, transposed)


def _cast(tensor: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    """`tensor.to(dtype)`, without the call where there is nothing to do: the layer is often bound by Python."""
    return tensor if tensor is None or tensor.dtype == dtype else tensor.to(dtype)


def check_level(level: int) -> int:
    """The level as an int, if there is such a one."""
    if isinstance(level, bool) or not isinstance(level, numbers.Integral) or int(level) not in LEVELS:
        allowed = "; ".join(f"{n} keeps {saved}" for n, saved in LEVELS.items())
        raise ValueError(f"checkpoint_level is {level!r}; allowed: {allowed}")
    return int(level)


def check_arguments(x: Tensor, W: Tensor, V: Tensor, U: Tensor, *, casting: bool) -> None:
    """Raise a `ValueError` that names what was given and what is allowed. `casting`: autocast makes dtypes agree."""
    if W.ndim != 2 or V.shape != W.shape or U.shape != W.shape[::-1]:
        shapes = f"W {tuple(W.shape)}, V {tuple(V.shape)}, U {tuple(U.shape)}"
        raise ValueError(f"shapes of {shapes}; W and V must be (hidden, intermediate), U (intermediate, hidden)")
    if x.ndim == 0 or x.shape[-1] != W.shape[0]:
        raise ValueError(f"x has shape {tuple(x.shape)}; its last dimension must be the hidden size, {W.shape[0]}")
    dtypes = {tensor.dtype for tensor in (x, W, V, U)}
    if not dtypes <= set(DTYPES) or (len(dtypes) > 1 and not casting):
        names = ", ".join(sorted(map(str, dtypes)))
        raise ValueError(f"dtypes {names}; x and the weights must have one of {', '.join(map(str, DTYPES))}")
