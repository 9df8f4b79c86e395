"""Llama cut over ranks by heads and channels: which products are split along what, and where ranks must talk.

Within a block the q, k, v, gate and up products give each rank its own heads and channels; out and down add the ranks'
parts up. Between the blocks each rank holds a part of the sequence instead (Megatron's sequence parallelism), so norms
and residuals are not done n times over, and one sum over all ranks becomes a reduce-scatter and, later, an all-gather:
the same bytes. What it costs, for a residual stream of S bytes: per block two gathers and two scatters in forward, four
of each in both passes together with the gradients, each moving S·(n−1)/n; none of it can hide behind a product that
waits for it.

The embedding and the head are split by words. Tied, they are split alike, so that one shard serves both. The loss
is computed on split logits (`loss_parallel`), which are never gathered.
"""

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from helpers.models import Llama

SEQUENCE, CHANNELS = Shard(1), Shard(-1)  # of (B, T, C)


def block_plan() -> dict[str, ParallelStyle]:
    gather = {"input_layouts": (SEQUENCE,), "desired_input_layouts": (Replicate(),)}
    return {
        "norm1": SequenceParallel(),
        # x is gathered; cos, sin and the mask are whole on every rank
        "attention": PrepareModuleInput(
            input_layouts=(SEQUENCE, None, None, None), desired_input_layouts=(Replicate(), None, None, None)
        ),
        **{f"attention.{name}": ColwiseParallel() for name in ("q", "k", "v")},
        "attention.out": RowwiseParallel(output_layouts=SEQUENCE),
        "norm2": SequenceParallel(),
        "mlp": PrepareModuleInput(**gather),
        **{f"mlp.{name}": ColwiseParallel() for name in ("gate", "up")},
        "mlp.down": RowwiseParallel(output_layouts=SEQUENCE),
    }


def tensor_parallel(model: Llama, mesh: DeviceMesh) -> nn.Module:
    """Cut the model over the mesh, in place. Its logits are a DTensor split by words."""
    tied = model.head.weight is model.embedding.weight
    outside = {
        "embedding": RowwiseParallel(input_layouts=Replicate(), output_layouts=SEQUENCE),
        "norm": SequenceParallel(),
        "head": ColwiseParallel(input_layouts=SEQUENCE, output_layouts=CHANNELS, use_local_output=False),
    }
    parallelize_module(model, mesh, outside)
    for layer in model.layers:
        parallelize_module(layer, mesh, block_plan())
    if tied:
        model.head.weight = model.embedding.weight
    return model
