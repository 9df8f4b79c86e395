"""Activation checkpointing: what the blocks keep for backward, and what they compute again.

none            all that autograd saves
full            a block's input; backward runs the whole block again (a third more products)
selective       what products and attention return; only the cheap things between them run again
memory budget   the compiler keeps the given share of what it would keep, and chooses what
"""

import contextlib
import functools
from collections.abc import Callable

import torch
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

KEPT = {
    operator
    for name in (
        "mm",
        "bmm",
        "addmm",
        "_scaled_mm",
        "_scaled_dot_product_flash_attention",
        "_scaled_dot_product_flash_attention_for_cpu",
        "_scaled_dot_product_cudnn_attention",
        "_scaled_dot_product_efficient_attention",
    )
    for operator in [getattr(torch.ops.aten, name).default]
}


def policy(context, operator, *args, **kwargs) -> CheckpointPolicy:
    """Keep what a product or an attention kernel returns; compute everything else again."""
    return CheckpointPolicy.MUST_SAVE if operator in KEPT else CheckpointPolicy.PREFER_RECOMPUTE


def runner(way: str) -> Callable | None:
    """What `Llama.checkpoint` is set to: runs a block with its arguments. None where blocks are simply called."""
    # The state of random numbers isn't kept: there is no dropout, and it can't be read while a graph is captured.
    plain = functools.partial(checkpoint, use_reentrant=False, preserve_rng_state=False)
    if way == "full":
        return plain
    if way == "selective":
        return functools.partial(plain, context_fn=functools.partial(create_selective_checkpoint_contexts, policy))
    return None


def apply(model: nn.Module, way: str) -> nn.Module:
    """Set how a Llama runs its blocks."""
    model.checkpoint = runner(way)
    return model


def budget(way: str, share: float) -> contextlib.AbstractContextManager:
    """Within it, the compiler is held to a share of the memory; it must be entered wherever it may compile."""
    if way != "memory budget":
        return contextlib.nullcontext()
    import torch._functorch.config as compiler

    return compiler.patch(activation_memory_budget=share)
