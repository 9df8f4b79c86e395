"""A Llama spread over ranks by each strategy, and what a training step needs to know of it.

What a rank holds of P parameters in fp32 with AdamW, over n ranks, and moves in a step (· (n−1)/n for each byte):

    ddp     16P                          8P       one all-reduce of the gradients (a scatter and a gather)
    zero2   16P/n + 2P in bf16           6P       one gather of bf16 parameters, one scatter of fp32 gradients
    zero3   16P/n + two blocks of them   8P       the gather twice
    tp      16P/n                        grows with tokens, not with P: see `plan`
"""

import contextlib
import inspect
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor.experimental import implicit_replication
from torch.distributed.tensor.parallel import loss_parallel
from torch.nn.parallel import DistributedDataParallel

from helpers.models import Llama
from helpers.rush import checkpointing

from .job import Job
from .plan import tensor_parallel

# torch 2.13 renamed it
SYNC_BUFFERS = (
    "forward_sync_buffers"
    if "forward_sync_buffers" in inspect.signature(DistributedDataParallel).parameters
    else "broadcast_buffers"
)


def attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None) -> Tensor:
    """Causal attention that never forms the scores."""
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)


def build(job: Job, device: torch.device, mesh: DeviceMesh | None, *, lay_out_on: str | None = "meta") -> nn.Module:
    """The model of a job, spread over the mesh. No rank ever holds more of it than its share and one weight.

    It is laid out without memory, cut, and only then filled. Each rank draws every weight whole, from the same seed,
    and keeps its part: so all strategies on all numbers of ranks start from the same weights, and none is sent.
    `lay_out_on=None` lays it out on the device itself.
    """
    with torch.device(lay_out_on or device):
        model = Llama.from_name(job.model, attend=attention, residual=torch.bfloat16 if autocasts(job) else None)
    tied = model.head.weight is model.embedding.weight
    checkpointing.apply(model, job.checkpointing)
    if job.strategy == "tp":
        tensor_parallel(model, mesh)
    elif job.strategy in ("zero2", "zero3"):
        shard(model, mesh, gather_again=job.strategy == "zero3", precision=job.precision)
    if lay_out_on:
        model.to_empty(device=device)
    if tied:  # to_empty makes two weights of one
        model.head.weight = model.embedding.weight
    with implicit_replication():
        model.reset_parameters(torch.Generator(device).manual_seed(job.seed))
    if job.strategy == "ddp":
        # Weights and tables are equal already, so neither is sent; gradients live in the buckets, so they exist once.
        return DistributedDataParallel(
            model,
            bucket_cap_mb=job.bucket_mib,
            gradient_as_bucket_view=True,
            init_sync=False,
            **{SYNC_BUFFERS: False},
        )
    return model


def shard(model: Llama, mesh: DeviceMesh, *, gather_again: bool, precision: str) -> nn.Module:
    """FSDP2, which gathers and frees the parameters of a unit as one.

    `gather_again` frees a unit's parameters after forward and gathers them once more for backward (ZeRO-3); without
    it they stay (ZeRO-2). The head's stay in any case: backward begins with it. Parameters are cast, inputs are not:
    the residual stream has the embedding's type, and the tables of positions stay in fp32.
    """
    compute = {"fp32": torch.float32, "amp-bf16": torch.bfloat16}[precision]
    policy = MixedPrecisionPolicy(param_dtype=compute, reduce_dtype=torch.float32, cast_forward_inputs=False)
    *body, head = units(model)
    for unit in body:
        fully_shard(unit, mesh=mesh, mp_policy=policy, reshard_after_forward=gather_again)
    fully_shard(head, mesh=mesh, mp_policy=policy, reshard_after_forward=False)
    if head is not model:
        fully_shard(model, mesh=mesh, mp_policy=policy)
    return model


def units(model: Llama) -> list[nn.Module | list[nn.Module]]:
    """What is gathered together: the embedding, each block, last what is around the head.

    A tied head is the embedding, and is used from first to last: so the model itself is the last unit.
    """
    if model.head.weight is model.embedding.weight:
        return [*model.layers, model]
    return [model.embedding, *model.layers, [model.norm, model.head]]


def autocasts(job: Job) -> bool:
    """Whether compute is in bf16 because of autocast; FSDP casts what it gathers."""
    return job.precision == "amp-bf16" and job.strategy not in ("zero2", "zero3")


def loss_of(job: Job, model: nn.Module, device: torch.device) -> Callable[[Tensor, Tensor], Tensor]:
    """`loss(tokens, targets)`, both (B, T): the mean cross-entropy, in fp32."""

    def loss(tokens: Tensor, targets: Tensor) -> Tensor:
        with torch.autocast(device.type, torch.bfloat16, enabled=autocasts(job)):
            logits = model(tokens)  # (B, T, V)
        return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())

    return loss


def differentiating(job: Job) -> contextlib.AbstractContextManager:
    """What loss and backward run in."""
    return loss_parallel() if job.strategy == "tp" else contextlib.nullcontext()


@contextlib.contextmanager
def synchronising(model: nn.Module, now: bool):
    """Backward inside averages the gradients over the ranks, or (`now` false) keeps this rank's for a later one.

    Keeping them costs zero2 and zero3 whole gradients, in the type of the parameters that they gather.
    """
    if isinstance(model, DistributedDataParallel) and not now:
        with model.no_sync():
            yield
        return
    if isinstance(model, FSDPModule):
        model.set_requires_gradient_sync(now)
    yield
