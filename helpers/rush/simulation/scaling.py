"""PREDICTION: the time of a step on many GPUs, from the time that one takes to compute and the bytes that all exchange.

    predict(Job(strategy="zero3", model="llama-3.1-8b", precision="amp-bf16", batch=64, sequence=2048), ranks=64,
            cluster=CLUSTERS[2], compute_ms=900.0)

Nothing of it is measured but `compute_ms`, which `memory.rank_memory` measures on one GPU, the other ranks left out.
What it takes for granted is listed by `links.assumptions()`.
"""

import math
from typing import Any

from helpers.rush.distributed.strategies import Job

from .links import START_US, TREE_SHARE, Cluster
from .traffic import AFTER, BACKWARD, FORWARD, REDUCE, ROUNDS, Transfer, transfers

FORWARD_SHARE = {"none": 1 / 3, "selective": 1 / 3, "full": 1 / 4}  # of the computation, by checkpointing


def predict(job: Job, ranks: int, cluster: Cluster, compute_ms: float, *, overlapped: bool = True) -> dict[str, Any]:
    """A row: communication, what of it is not hidden, the step, and how much of the GPUs' time is computation.

    `compute_ms` is a step of one rank of `ranks` without communication.
    """
    check(ranks, cluster, compute_ms)
    found = transfers(job, ranks)
    times = {transfer: transfer_ms(transfer, ranks, cluster) for transfer in found}
    total = sum(times.values())
    exposed = exposed_ms(times, compute_ms, FORWARD_SHARE[job.checkpointing]) if overlapped else total
    step = compute_ms + exposed
    return {
        "predicted": True,
        "strategy": job.strategy,
        "model": job.model,
        "cluster": cluster.name,
        "ranks": ranks,
        "nodes": nodes(ranks, cluster),
        "overlapped": overlapped,
        "sent_gib": sum(transfer.sent(ranks) for transfer in found) / 2**30,
        "compute_ms": compute_ms,
        "communication_ms": total,
        "exposed_ms": exposed,
        "step_ms": step,
        "tokens_per_s": job.batch * job.sequence / step * 1e3,
        "efficiency": compute_ms / step,
    }


def transfer_ms(transfer: Transfer, ranks: int, cluster: Cluster) -> float:
    """How long the collectives of a transfer take, one after another, with nothing beside them.

    Within a machine each rank sends (n−1)/n of the bytes over its own link. To the next machine go as many rings (or
    trees) as there are GPUs in one, each with a part of the bytes; the slower kind of link sets the pace.
    """
    inside, between = cluster.inside, cluster.between
    here, machines = min(ranks, cluster.gpus), nodes(ranks, cluster)
    rounds = ROUNDS[transfer.kind]
    leaving = rounds * transfer.bytes / here * (machines - 1) / machines
    ms = max(transfer.sent(ranks) / inside.gb_s if here > 1 else 0.0, leaving / between.gb_s) / 1e6
    hops_us = (ranks - machines) * inside.hop_us + (machines - 1) * between.hop_us
    ring = ms + transfer.count * (START_US + rounds * hops_us) / 1e3
    if transfer.kind != REDUCE:
        return ring
    hops_us = (here - 1) * inside.tree_hop_us + math.ceil(math.log2(machines)) * between.tree_hop_us
    return min(ring, ms / TREE_SHARE + transfer.count * rounds * hops_us / 1e3)


def exposed_ms(times: dict[Transfer, float], compute_ms: float, forward_share: float) -> float:
    """Communication that no computation hides: what must be waited for, and what is longer than its pass."""
    exposed = sum(time for transfer, time in times.items() if transfer.phase == AFTER)
    for phase, window in ((FORWARD, forward_share * compute_ms), (BACKWARD, (1 - forward_share) * compute_ms)):
        hidden = 0.0
        for transfer, time in times.items():
            if transfer.phase == phase:
                alone = {"none": time, "all": 0.0}.get(transfer.hides, time / transfer.count)
                exposed += alone
                hidden += time - alone
        exposed += max(hidden - window, 0.0)
    return exposed


def nodes(ranks: int, cluster: Cluster) -> int:
    return -(-ranks // cluster.gpus)


def check(ranks: int, cluster: Cluster, compute_ms: float) -> None:
    if ranks > cluster.gpus and ranks % cluster.gpus:
        raise ValueError(f"ranks is {ranks}; beyond one machine it must be a multiple of its GPUs, {cluster.gpus}")
    if not compute_ms > 0:
        raise ValueError(f"compute_ms is {compute_ms}; it must be above 0")
