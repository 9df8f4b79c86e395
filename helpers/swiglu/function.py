"""`MemoryOptimizedSwigluMLPFunction`: the layer as one autograd node that keeps what its level says."""

import torch
from torch import Tensor

from helpers.lab.precision import autocast_dtype, without_autocast

from . import opaque, steps
from .levels import KEEP_INPUT, check_arguments, check_level


class MemoryOptimizedSwigluMLPFunction(torch.autograd.Function):
    """SwiGLU, (SiLU(xW) ⊙ xV) U, with a choice of what is kept for backward.

    Bytes kept a token, with d = hidden, I = intermediate size and b = bytes an element, and the matrix
    products of forward + backward; a plain module keeps (4I + d) b and needs 3 + 6:

        level 0   (3I + d) b          3 + 6
        level 1   d b                 3 + 8
        level 2   (2I + d) b          3 + 6
        level 3   2I (1 + 4/128) + d b    3 + 6, gradients from activations rounded to 8 bits

    Under autocast the products run in autocast's type; the weights are kept as they are and cast again in
    backward, which costs one pass over them and saves a copy. On a GPU, backward writes gradients over what was kept
    unless the graph is retained: tensors taken from `saved_tensors` or from a pack hook don't outlive it. Double
    backward and the transforms of torch.func aren't supported.
    """

    @staticmethod
    def forward(ctx, x: Tensor, W: Tensor, V: Tensor, U: Tensor, checkpoint_level: int) -> Tensor:
        level = check_level(checkpoint_level)
        asked = autocast_dtype(x) if isinstance(x, Tensor) else None
        check_arguments(x, W, V, U, casting=asked is not None)
        dtype = asked or x.dtype
        needs = list(ctx.needs_input_grad[:4])
        if not any(needs):
            level = KEEP_INPUT  # nothing has to be kept
        x_cast = _cast(x, dtype)
        with without_autocast(x):
            y, *kept = _forward(x_cast, _cast(W, dtype), _cast(V, dtype), _cast(U, dtype), level)
        need_x, need_W, need_V, _ = needs
        again = level == KEEP_INPUT and any(needs)
        ctx.save_for_backward(
            x_cast if need_W or need_V or again else None,
            W if need_x or again else None,
            V if need_x or again else None,
            U if need_x or need_W or need_V else None,
            *kept,
        )
        ctx.level, ctx.dtype, ctx.dtypes = level, dtype, (x.dtype, W.dtype, V.dtype, U.dtype)
        ctx.x_shape, ctx.intermediate = x.shape, W.shape[1]
        return y

    @staticmethod
    def backward(ctx, l: Tensor) -> tuple[Tensor | None, ...]:
        saved = ctx.saved_tensors
        create_graph = torch.is_grad_enabled() and not torch.compiler.is_compiling()
        x, *weights = [_cast(tensor, ctx.dtype) for tensor in saved[:4]]
        needs = list(ctx.needs_input_grad[:4])
        with torch.no_grad(), without_autocast(l):
            arguments = (_cast(l, ctx.dtype), x, *weights, list(saved[4:]), ctx.level, needs)
            grads = _backward(*arguments, x_shape=ctx.x_shape, intermediate=ctx.intermediate)
        grads = [_cast(grad, dtype) for grad, dtype in zip(grads, ctx.dtypes, strict=True)]
        if create_graph:
            grads = _refuse_second_derivative(grads, [l, *saved[:4]])
        return *grads, None


def _forward(x: Tensor, W: Tensor, V: Tensor, U: Tensor, level: int) -> list[Tensor]:
    if torch.compiler.is_compiling():
        return opaque.forward(x, W, V, U, level)
    y, kept = steps.forward(x, W, V, U, level)
    return [y, *kept]


def _backward(l, x, W, V, U, kept, level, needs, *, x_shape, intermediate) -> list[Tensor | None]:
    if torch.compiler.is_compiling():
        found = opaque.backward(l, x, W, V, U, kept, level, needs, list(x_shape), intermediate)
        remaining = iter(found)
        return [next(remaining) if needed else None for needed in needs]
    return steps.backward(l, x, W, V, U, kept, level, needs, x_shape, overwrite=not _graph_is_retained())


def _graph_is_retained() -> bool:
    """Whether backward may come again (`retain_graph=True`) and needs what was kept as it was."""
    asked = getattr(torch._C._autograd, "_get_current_graph_task_keep_graph", None)
    return True if asked is None else asked()


def _cast(tensor: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    """`tensor.to(dtype)`, without the call where there is nothing to do: the layer is often bound by Python."""
    return tensor if tensor is None or tensor.dtype == dtype else tensor.to(dtype)


class _RefuseSecondDerivative(torch.autograd.Function):
    """Passes gradients through; differentiating them again says that it isn't supported."""

    @staticmethod
    def forward(ctx, count: int, *tensors: Tensor) -> tuple[Tensor, ...]:
        return tuple(tensor.view_as(tensor) for tensor in tensors[:count])

    @staticmethod
    def backward(ctx, *grads: Tensor) -> None:
        raise RuntimeError("MemoryOptimizedSwigluMLP: double backward isn't supported; use SwigluMLP for it")


def _refuse_second_derivative(grads: list[Tensor | None], roots: list[Tensor | None]) -> list[Tensor | None]:
    """Hang the gradients on the tensors they depend on, by a node that refuses."""
    present = [grad for grad in grads if grad is not None]
    guarded = iter(_RefuseSecondDerivative.apply(len(present), *present, *(r for r in roots if r is not None)))
    return [None if grad is None else next(guarded) for grad in grads]
