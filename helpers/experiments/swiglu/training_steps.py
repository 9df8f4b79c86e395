"""Training steps of one layer, and the check that each precedes its timing: the gradients are the plain module's."""

from collections.abc import Callable

import torch
from torch import Tensor, nn

from ...lab import device, peak_memory
from ...lab.memory import MIB
from ...lab.records import Row
from ...lab.timing import check_agreement
from ...swiglu import MemoryOptimizedSwigluMLP, SwigluMLP
from ...swiglu.steps import KEEP_8BIT
from .layer_variants import OURS, PLAIN, weight_gradients

TOLERANCE_8BIT = 3e-2  # level 3's gradients come from rounded activations


def check_layer(hidden: int, intermediate: int, dtype: str, level: int, tokens: int = 256) -> None:
    """Raise `Disagreement` unless a level computes what the plain module computes, in this type and width."""
    factory = {"device": device(), "dtype": getattr(torch, dtype)}
    plain = SwigluMLP(hidden, intermediate, **factory)
    ours = MemoryOptimizedSwigluMLP.from_plain(plain, level)
    x, l = (torch.randn(tokens, hidden, **factory) for _ in range(2))
    x.requires_grad_()
    variants = {"plain module": train_step(plain, plain, x, l), f"level {level}": train_step(ours, ours, x, l)}
    check_agreement(variants, TOLERANCE_8BIT if level == KEEP_8BIT else None)


def train_step(
    forward: Callable[[Tensor], Tensor], owner: nn.Module, x: Tensor, l: Tensor
) -> Callable[[], list[Tensor]]:
    """Forward and backward from fresh gradients; returns the output and the gradients of x, W, V, U."""

    def step() -> list[Tensor]:
        x.grad = None
        owner.zero_grad(set_to_none=True)
        y = forward(x)
        y.backward(l)
        return [y, x.grad, *weight_gradients(owner)]

    return step


def check_variant(
    name: str, forward: Callable[[Tensor], Tensor], owner: nn.Module, plain: nn.Module, x: Tensor, l: Tensor
) -> Row:
    """Check a variant against the plain module and weigh it. Runs it often enough that compiling is over."""
    step = train_step(forward, owner, x, l)
    tolerance = TOLERANCE_8BIT if name == f"{OURS}{KEEP_8BIT}" else None
    errors = check_agreement({PLAIN: train_step(plain, plain, x, l), name: step}, tolerance)
    step()
    x.grad = None
    owner.zero_grad(set_to_none=True)
    # What forward leaves behind is its output and what it saves but for x, which is as large as the output.
    saved = peak_memory(lambda: forward(x)).kept_bytes
    peak = peak_memory(step).added_bytes
    return {"error": errors[name], "saved_mib": saved / MIB, "peak_added_mib": peak / MIB}
