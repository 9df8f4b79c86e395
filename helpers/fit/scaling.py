"""PREDICTION: the time of a step on many GPUs, from one GPU's compute time and the bytes that the ranks exchange.

    predict(Job(strategy="zero3", model="llama-3.1-8b", precision="amp-bf16", batch=64, sequence=2048), ranks=64,
            inside=CLUSTERS[2], compute_ms=900.0)

`compute_ms` is that of one GPU, measured or assumed. Bandwidths and latencies are data with their sources,
so that they can be checked and replaced. Beside them is taken for granted:

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
"""

import math
from dataclasses import dataclass

from ..distributed import Job
from .traffic import BACKWARD, FORWARD, REDUCE, ROUNDS, Transfer, transfers


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
