"""A `Job`, checked before anything is allocated, and its Llama distributed over ranks by each strategy.

Bytes a rank stores for P parameters in fp32 with AdamW over n ranks, and bytes it sends in a step (times (n−1)/n):

    ddp     16P                          8P       one all-reduce of the gradients (a scatter and a gather)
    zero2   16P/n + 2P in bf16           6P       one gather of bf16 parameters, one scatter of fp32 gradients
    zero3   16P/n + two blocks in bf16   8P       the gather twice
"""

import contextlib
import inspect
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor.experimental import implicit_replication
from torch.nn.parallel import DistributedDataParallel

from ..lab.arguments import check_at_least, check_choice
from ..lab.machine import missing_because
from ..models import Llama
from ..models.llama import preset
from ..training.checkpointing import checkpoint_with

CHOICES = {
    # single: one rank. ddp: each rank has everything, gradients are averaged. zero2: gradients and optimizer state are
    # sharded, parameters are gathered once a pass. zero3: parameters are sharded too, gathered before each use and
    # freed after it.
    "strategy": ("single", "ddp", "zero2", "zero3"),
    "backend": ("gloo", "nccl"),
    "precision": ("fp32", "amp-bf16"),
    "checkpointing": ("none", "full", "selective"),
}
# The parameter's name changed in torch 2.13.
SYNC_BUFFERS = (
    "forward_sync_buffers"
    if "forward_sync_buffers" in inspect.signature(DistributedDataParallel).parameters
    else "broadcast_buffers"
)


@dataclass(frozen=True, kw_only=True)
class Job:
    """One training run. The same job on any number of ranks, by any strategy, trains on the same tokens."""

    strategy: str = "ddp"
    model: str = "tiny"
    layers: int | None = None  # of the model; None: all
    backend: str = "gloo"  # nccl needs CUDA; gloo runs on the CPU
    batch: int = 8  # sequences of a step, over all ranks
    sequence: int = 64
    accumulate: int = 1  # micro-batches of a step
    steps: int = 5
    precision: str = "fp32"  # amp-bf16: fp32 parameters and optimizer state, bf16 compute
    checkpointing: str = "none"  # as in `helpers.training.checkpointing`
    bucket_mib: float = 25.0  # ddp: size of the gradient buckets
    learning_rate: float = 1e-3
    clip: float = 1.0  # maximal gradient norm
    seed: int = 0
    timeout_s: float = 50.0  # of collectives

    def check(self, ranks: int) -> None:
        """A `ValueError` for the first thing that can't work on so many ranks of this machine."""
        sizes = preset(self.model)
        for field, valid in CHOICES.items():
            check_choice(valid, **{field: getattr(self, field)})
        check_at_least(1, ranks=ranks, batch=self.batch, sequence=self.sequence, steps=self.steps)
        check_at_least(1, accumulate=self.accumulate, layers=1 if self.layers is None else self.layers)
        for field in ("bucket_mib", "learning_rate", "clip", "timeout_s"):
            if not getattr(self, field) > 0:
                raise ValueError(f"{field} is {getattr(self, field)}; it must be above 0")
        if self.sequence > (longest := sizes.get("max_length", 131072)):
            raise ValueError(f"sequence is {self.sequence}; {self.model} has {longest} positions")
        if self.strategy == "single" and ranks != 1:
            raise ValueError(f"strategy 'single' has one rank, not {ranks}")
        if self.batch % (ranks * self.accumulate):
            product = f"{ranks * self.accumulate}: {ranks} ranks × {self.accumulate} micro-batches"
            raise ValueError(f"batch is {self.batch}; it must be a multiple of {product}")
        if self.backend == "nccl":
            if reason := missing_because("CUDA"):
                raise ValueError(f"backend 'nccl' {reason}, and this machine has none; 'gloo' runs on the CPU")
            if (gpus := torch.cuda.device_count()) < ranks:
                raise ValueError(f"backend 'nccl' needs a GPU for each rank: {ranks} ranks, {gpus} GPUs")


def attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None) -> Tensor:
    """Causal attention that never forms the scores."""
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)


def build_model(
    job: Job, device: torch.device, mesh: DeviceMesh | None, *, lay_out_on: str | None = "meta"
) -> nn.Module:
    """The model of a job, distributed over the mesh. A rank allocates at most its shard plus one full weight.

    The model is created on the meta device, sharded, and only then initialised. Each rank draws every weight in full
    from the same seed and keeps its shard: initial weights are the same for all strategies and numbers of ranks, and
    nothing is sent. `lay_out_on=None` creates the model on `device` itself.
    """
    with torch.device(lay_out_on or device):
        model = Llama.from_name(
            job.model,
            attend=attention,
            residual=torch.bfloat16 if autocasts(job) else None,
            **({"layers": job.layers} if job.layers else {}),
        )
    tied = model.head.weight is model.embedding.weight
    model.checkpoint = checkpoint_with(job.checkpointing)
    if job.strategy in ("zero2", "zero3"):
        shard(model, mesh, gather_again=job.strategy == "zero3", precision=job.precision)
    if lay_out_on:
        model.to_empty(device=device)
    if tied:  # `to_empty` separates tied weights
        model.head.weight = model.embedding.weight
    with implicit_replication():
        model.reset_parameters(torch.Generator(device).manual_seed(job.seed))
    if job.strategy == "ddp":
        # Weights and buffers are equal already, so neither is sent; gradients are views of the buckets, not copies.
        return DistributedDataParallel(
            model, bucket_cap_mb=job.bucket_mib, gradient_as_bucket_view=True, init_sync=False, **{SYNC_BUFFERS: False}
        )
    return model


def shard(model: Llama, mesh: DeviceMesh, *, gather_again: bool, precision: str) -> None:
    """FSDP2, in place; it gathers and frees the parameters of a unit together.

    `gather_again` frees a unit's parameters after forward and gathers them again for backward (ZeRO-3); without it they
    stay gathered (ZeRO-2). The head's always stay, as backward begins with it. Parameters are cast, inputs aren't: the
    residual stream has the embedding's dtype, and the RoPE tables stay in fp32.
    """
    compute = {"fp32": torch.float32, "amp-bf16": torch.bfloat16}[precision]
    policy = MixedPrecisionPolicy(param_dtype=compute, reduce_dtype=torch.float32, cast_forward_inputs=False)
    *body, head = units(model)
    for unit in body:
        fully_shard(unit, mesh=mesh, mp_policy=policy, reshard_after_forward=gather_again)
    fully_shard(head, mesh=mesh, mp_policy=policy, reshard_after_forward=False)
    if head is not model:
        fully_shard(model, mesh=mesh, mp_policy=policy)


def units(model: Llama) -> list[nn.Module | list[nn.Module]]:
    """Modules that are gathered together: the embedding, each block, and last the final norm with the head.

    A tied head is also the embedding, needed from the first operation to the last: then the model itself is the last
    unit.
    """
    if model.head.weight is model.embedding.weight:
        return [*model.layers, model]
    return [model.embedding, *model.layers, [model.norm, model.head]]


def autocasts(job: Job) -> bool:
    """Whether bf16 compute comes from autocast; FSDP casts the gathered parameters instead."""
    return job.precision == "amp-bf16" and job.strategy not in ("zero2", "zero3")


def cross_entropy(job: Job, model: nn.Module, tokens: Tensor) -> Tensor:
    """The mean over tokens (B, T + 1) but the first of each row, in fp32."""
    with torch.autocast(tokens.device.type, torch.bfloat16, enabled=autocasts(job)):
        logits = model(tokens[:, :-1])  # (B, T, V)
    return F.cross_entropy(logits.flatten(0, 1).float(), tokens[:, 1:].flatten())


def synchronising(model: nn.Module, now: bool) -> contextlib.AbstractContextManager:
    """A context in which backward averages gradients over the ranks, or (`now` false) accumulates them locally.

    Local accumulation costs zero2 and zero3 unsharded gradients, in the dtype of the gathered parameters.
    """
    if isinstance(model, FSDPModule):
        model.set_requires_gradient_sync(now)
    apart = isinstance(model, DistributedDataParallel) and not now
    return model.no_sync() if apart else contextlib.nullcontext()
