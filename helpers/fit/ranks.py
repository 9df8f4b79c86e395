"""A step of many ranks that aren't there: the bytes that they exchange, its time, and the memory of one of them.

    transfers(Job(strategy="zero3", model="llama-3.1-8b", precision="amp-bf16"), ranks=8)
    predict(Job(strategy="zero3", model="llama-3.1-8b", precision="amp-bf16", batch=64, sequence=2048), ranks=64,
            inside=CLUSTERS[2], compute_ms=900.0)
    rank_memory(Job(strategy="zero3", model="llama-3.1-8b", batch=64), ranks=64)

The bytes are DERIVED: an all-gather or reduce-scatter of S bytes over n ranks makes each rank send S·(n−1)/n, an
all-reduce twice that, by any algorithm that balances the ranks.

The time is PREDICTED from these bytes and one GPU's time of computation, measured or assumed. Bandwidths and latencies
are data with their sources, so that they can be checked and replaced. Beside them is taken for granted:

- a rank sends (n−1)/n of the bytes, twice for an all-reduce (nccl-tests, doc/PERFORMANCE.md);
- an all-reduce takes a tree over the machines where that is faster: fewer hops, a lower rate (NCCL, tuning.cc);
- switches don't add up; with NVLink SHARP an all-reduce of 8 ranks is 1.3 times as fast, at 480 GB/s instead of 370
  (github.com/NVIDIA/nccl-tests/issues/212);
- over several machines there are as many rings as GPUs in one, each leaving it by another adapter, and the slower of
  the two kinds of link sets the pace: how NCCL builds rings; a model, and not checked here;
- nobody else is on the network, and computation isn't slowed by the copies beside it: optimistic, as NCCL's kernels
  take some of the GPU's processors and bandwidth;
- all ranks compute equally long, and none waits for another: optimistic;
- backward is two thirds of the computation, three quarters with full checkpointing, by its products;
- collectives that may hide do so behind all computation of their pass, at an even pace; the first gather of a step and
  the last reduction stand alone: how DDP and FSDP2 order them.

The memory is SIMULATED: a rank runs the training code in a fake process group, whose collectives return at once and
move nothing: values are meaningless, but shapes, shards and the order of operations and collectives are those of a real
cluster. Allocations are, too, except for NCCL's own buffers, which torch doesn't count (some 100 MiB to a few GiB). On
CUDA the allocator's peak is measured. On the CPU the same code runs on fake tensors, and a `Ledger` counts the bytes
they would take; kernels' workspaces (cuBLAS: 32 MiB and more) are not counted.
"""

import contextlib
import functools
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel

from ..distributed import Job
from ..distributed.training import Trainer, build_trainer, tokens_of
from ..lab.arguments import check_choice
from ..lab.machine import device as this_device
from ..lab.machine import missing_because
from ..lab.memory import GIB, peak_memory
from ..models import Llama
from ..models.llama import preset
from .ledger import Ledger, Peak, deepened, split_step

GATHER, SCATTER, REDUCE = "all-gather", "reduce-scatter", "all-reduce"
FORWARD, BACKWARD, AFTER = "forward", "backward", "after"
ROUNDS = {GATHER: 1, SCATTER: 1, REDUCE: 2}  # how often (n−1)/n of the bytes leave a rank
FP32 = 4  # bytes of a number
BYTES = {"fp32": FP32, "amp-bf16": 2}  # of a gathered parameter

Weights = list[tuple[int, int]]  # rows and columns of each; a norm's weight has one column


@functools.cache
def units(name: str, layers: int | None = None) -> list[Weights]:
    """The weights of a preset that are gathered together: of an untied embedding, of each block, of norm and head."""
    with torch.device("meta"):
        model = Llama.from_name(name, **({"layers": layers} if layers else {}))
    table, head = model.embedding.weight, model.head.weight
    parts = [[table]] if head is not table else []
    parts += [list(layer.parameters()) for layer in model.layers]
    parts.append([head, model.norm.weight])
    return [[(len(weight), weight[0].numel()) for weight in part] for part in parts]


def elements(weights: Weights) -> int:
    return sum(rows * columns for rows, columns in weights)


def share(weights: Weights, ranks: int) -> int:
    """Elements of a rank's shard when each weight's rows are divided over ranks, padded to equal shards."""
    return sum(-(-rows // ranks) * columns for rows, columns in weights)


@dataclass(frozen=True)
class Transfer:
    """`count` collectives of one kind and purpose; `bytes` is the sum of their unsharded sizes.

    No computation can overlap with `alone` of them.
    """

    what: str
    kind: str
    bytes: int
    count: int
    phase: str
    alone: int

    def sent(self, ranks: int) -> float:
        """Bytes that each rank sends and receives."""
        return ROUNDS[self.kind] * self.bytes * (ranks - 1) / ranks


def transfers(job: Job, ranks: int) -> list[Transfer]:
    """All transfers of a step over `ranks` ranks, in the order of the step, collectives of one purpose together."""
    job.check(ranks)
    check_choice(("single", "ddp", "zero2", "zero3"), strategy=job.strategy)
    if ranks == 1:
        return []
    every = units(job.model, job.layers)
    if job.strategy == "ddp":
        size = FP32 * sum(map(elements, every))
        buckets = max(1, math.ceil(size / (job.bucket_mib * 2**20)))
        return [Transfer("gradients", REDUCE, size, buckets, BACKWARD, alone=1)]

    def unsharded(gathered: list[Weights], itemsize: int) -> int:
        return itemsize * ranks * sum(share(unit, ranks) for unit in gathered)

    passes, itemsize = job.accumulate, BYTES[job.precision]
    parameters, count = passes * unsharded(every, itemsize), passes * len(every)
    derived = [Transfer("parameters", GATHER, parameters, count, FORWARD, alone=1)]
    if job.strategy == "zero3":
        body = every[:-1]  # norm and head stay between forward and backward
        again, count = passes * unsharded(body, itemsize), passes * len(body)
        derived.append(Transfer("parameters again", GATHER, again, count, BACKWARD, alone=0))
    return [
        *derived,
        Transfer("gradients", SCATTER, unsharded(every, FP32), len(every), BACKWARD, alone=1),
        Transfer("gradient norms", REDUCE, FP32 * sum(map(len, every)), 1, AFTER, alone=1),
    ]


# Time


@dataclass(frozen=True)
class Link:
    """Bandwidth (each direction, full duplex) and latency of a GPU's connection. GB are 1e9 bytes.

    Latencies are what NCCL itself assumes: hwLat of Ring and Tree, Simple, in its src/graph/tuning.cc.
    """

    name: str
    gb_s: float  # what collectives reach ("bus bandwidth" of nccl-tests)
    hop_us: float  # from one rank to the next, in a ring
    tree_hop_us: float  # and in a tree
    source: str


LINKS = (
    Link("PCIe 4", 21.0, 5.7, 4.0, "github.com/NVIDIA/nccl/issues/841: 8 × A100 80GB PCIe, the best reached there"),
    Link("PCIe 5", 28.0, 5.7, 4.0,
         "github.com/NVIDIA/nccl/issues/1639: 8 × RTX 5090; NVIDIA's comment there: the host is the limit"),
    Link("NVLink 4", 370.0, 3.4, 4.0,
         "github.com/NVIDIA/nccl-tests/issues/212, NVIDIA's comment: ring, or anything but an all-reduce with SHARP"),
    Link("InfiniBand NDR", 47.0, 14.0, 14.0,
         "github.com/NVIDIA/nccl-tests/issues/290, NVIDIA's comment: 46 to 48 for each adapter"),
)  # fmt: skip
CLUSTERS, BETWEEN = LINKS[:3], LINKS[3]  # within a machine, and between machines
GPUS = 8  # of a machine, each with an adapter of its own

START_US = 8.4  # latency of a ring without its hops: baseLat of Ring/Simple in NCCL's src/graph/tuning.cc
TREE_SHARE = 0.9  # of a ring's bandwidth: busBw*.9 of Tree, there

FORWARD_SHARE = {"none": 1 / 3, "selective": 1 / 3, "full": 1 / 4}  # of the computation, by checkpointing


def predict(job: Job, ranks: int, inside: Link, compute_ms: float) -> dict[str, float]:
    """Communication time, its exposed part (not overlapped), the step time, and compute efficiency.

    `inside` is the link within a machine; beyond one, `ranks` is a multiple of its GPUs. `compute_ms` is the time of a
    step of one of `ranks` ranks without communication.
    """
    times = {transfer: transfer_ms(transfer, ranks, inside) for transfer in transfers(job, ranks)}
    exposed = exposed_ms(times, compute_ms, FORWARD_SHARE[job.checkpointing])
    step = compute_ms + exposed
    return {
        "sent_gib": sum(transfer.sent(ranks) for transfer in times) / 2**30,
        "communication_ms": sum(times.values()),
        "exposed_ms": exposed,
        "step_ms": step,
        "tokens_per_s": job.batch * job.sequence / step * 1e3,
        "efficiency": compute_ms / step,
    }


def transfer_ms(transfer: Transfer, ranks: int, inside: Link) -> float:
    """Time of a transfer's collectives, one after another, without overlap or contention.

    Within a machine each rank sends (n−1)/n of the bytes over its own link. Between machines there are as many rings
    (or trees) as GPUs in a machine, each with a part of the bytes; the slower kind of link is the bottleneck.
    """
    gpus, machines = min(ranks, GPUS), nodes(ranks)  # GPUs in use in each machine
    rounds = ROUNDS[transfer.kind]
    leaving = rounds * transfer.bytes / gpus * (machines - 1) / machines
    ms = max(transfer.sent(ranks) / inside.gb_s if gpus > 1 else 0.0, leaving / BETWEEN.gb_s) / 1e6
    hops_us = (ranks - machines) * inside.hop_us + (machines - 1) * BETWEEN.hop_us
    ring = ms + transfer.count * (START_US + rounds * hops_us) / 1e3
    if transfer.kind != REDUCE:
        return ring
    hops_us = (gpus - 1) * inside.tree_hop_us + math.ceil(math.log2(machines)) * BETWEEN.tree_hop_us
    return min(ring, ms / TREE_SHARE + transfer.count * rounds * hops_us / 1e3)


def exposed_ms(times: dict[Transfer, float], compute_ms: float, forward_share: float) -> float:
    """Communication that isn't overlapped: collectives that nothing can hide, and what exceeds its pass's compute."""
    alone = {transfer: time * transfer.alone / transfer.count for transfer, time in times.items()}
    exposed = sum(alone.values())
    for phase, window in ((FORWARD, forward_share * compute_ms), (BACKWARD, (1 - forward_share) * compute_ms)):
        hidden = sum(time - alone[transfer] for transfer, time in times.items() if transfer.phase == phase)
        exposed += max(hidden - window, 0.0)
    return exposed


def nodes(ranks: int) -> int:
    return -(-ranks // GPUS)


# Memory

Rank = tuple[Trainer, Tensor]  # with the tokens of a step


def rank_memory(job: Job, ranks: int, *, count: bool = False) -> float:
    """The peak memory, in GiB, of a rank of `ranks` in a step after the first, which creates optimizer state.

    `job.batch` is that of all ranks, as in training; `job.backend` is ignored. On a GPU the peak is measured, unless
    `count=True`; on a CPU it is counted.
    """
    job.check(ranks)
    counts = count or this_device().type != "cuda"
    return (count_rank(job, ranks).peak.bytes if counts else _measured(job, ranks)) / GIB


def _measured(job: Job, ranks: int) -> int:
    device = this_device()
    with real(job, ranks, device) as (trainer, tokens):
        trainer.step(tokens)
        trainer.optimizer.zero_grad()
        return peak_memory(lambda: trainer.step(tokens)).peak_bytes


def rank_peak(job: Job, ranks: int) -> Peak:
    """The peak of a rank by part, counted with few layers; `rank_memory` counts all of them."""
    job.check(ranks)
    layers = job.layers or preset(job.model)["layers"]
    return deepened(lambda layers: count_rank(replace(job, layers=layers), ranks).peaks, layers)


def count_rank(job: Job, ranks: int) -> Ledger:
    """The ledger of a rank's second step."""
    ledger = Ledger(job.batch // ranks * job.sequence // job.accumulate)
    with weightless(job, ranks, ledger) as (trainer, tokens):
        plain = getattr(trainer.model, "module", trainer.model)
        ledger.name_flat("gradients")  # before the first step only DDP has flat tensors, its buckets
        split_step(ledger, plain, trainer.optimizer)
        ledger.begin_step(plain, trainer.optimizer, [tokens])
        trainer.step(tokens)
    return ledger


@contextlib.contextmanager
def fake_group(ranks: int) -> Iterator[None]:
    """A context in which this process is rank 0 of `ranks`, in torch's fake process group."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    if dist.is_initialized():
        raise ValueError("this process is in a process group already; leave it (destroy_process_group) to simulate one")
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=ranks)
    try:
        yield
    finally:
        dist.destroy_process_group()


@contextlib.contextmanager
def real(job: Job, ranks: int, device: torch.device) -> Iterator[Rank]:
    """The rank with real tensors on a device: its trainer, and a step's tokens."""
    with fake_group(ranks):
        yield _rank(job, ranks, device, init_device_mesh(device.type, (ranks,)), "meta")


@contextlib.contextmanager
def weightless(job: Job, ranks: int, watch: contextlib.AbstractContextManager) -> Iterator[Rank]:
    """The rank with fake tensors: nothing is computed or allocated, so a model of any size runs on any machine.

    All operations run within `watch`, from the creation of the weights on. DDP can do only one step: after the first it
    broadcasts the order of its buckets, which needs real values.
    """
    if reason := missing_because("torch 2.9"):
        raise ValueError(f"counting the memory of ranks {reason}")
    import torch.distributed._tools.fake_collectives  # registers collectives for fake tensors

    with fake_group(ranks):
        mesh = init_device_mesh("cpu", (ranks,))
        with FakeTensorMode(), watch:
            yield _rank(job, ranks, torch.device("cpu"), mesh, None)


def _rank(job: Job, ranks: int, device: torch.device, mesh: Any, lay_out_on: str | None) -> Rank:
    trainer = build_trainer(job, device, mesh, lay_out_on=lay_out_on)
    if isinstance(trainer.model, DistributedDataParallel):
        trainer.model.register_comm_hook(None, _all_reduce)
    return trainer, tokens_of(job, 0, 0, ranks, device)


def _all_reduce(_state: None, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """DDP's reduction of a bucket, in Python: its C++ code needs a result, which a fake group doesn't return."""
    gradients = bucket.buffer()
    dist.all_reduce(gradients)
    done = torch.futures.Future(devices=[gradients.device] if gradients.is_cuda else [])
    done.set_result(gradients)
    return done
