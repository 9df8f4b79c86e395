"""Activation checkpointing: which activations a block saves for backward.

none            everything that autograd saves
full            the block's input; backward recomputes the block (a third more products)
selective       results of products and attention; the cheap operations between them are recomputed
memory budget   the given share of what the compiler saves by default; the compiler chooses which
"""

import functools
from collections.abc import Callable

import torch
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from ..kernels import blocked_attention  # noqa: F401  registers its operator

# The operators whose results selective checkpointing saves: matrix products and attention, by torch's internal names.
SAVED_OPERATORS = [
    torch.ops.aten.mm.default,
    torch.ops.aten.bmm.default,
    torch.ops.aten.addmm.default,
    torch.ops.aten._scaled_mm.default,
    torch.ops.aten._scaled_dot_product_flash_attention.default,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default,
    torch.ops.aten._scaled_dot_product_cudnn_attention.default,
    torch.ops.aten._scaled_dot_product_efficient_attention.default,
    torch.ops.rush.blocked_attention.default,
]


def checkpoint_with(checkpointing: str) -> Callable | None:
    """The value for `Llama.checkpoint`: a function that runs a block with its arguments; None calls it directly."""
    # RNG state isn't preserved: there is no dropout, and it can't be read during graph capture.
    plain = functools.partial(checkpoint, use_reentrant=False, preserve_rng_state=False)
    if checkpointing == "full":
        return plain
    if checkpointing == "selective":
        contexts = functools.partial(create_selective_checkpoint_contexts, SAVED_OPERATORS)
        return functools.partial(plain, context_fn=contexts)
    return None
