"""The bytes that data-parallel ranks exchange in a training step, by formula.

    transfers(Job(strategy="zero3", model="llama-3.1-8b", precision="amp-bf16"), ranks=8)

An all-gather or reduce-scatter of S bytes over n ranks makes each rank send S·(n−1)/n, an all-reduce twice that, by any
algorithm that balances the ranks.
"""

import functools
import math
from dataclasses import dataclass

import torch

from ..distributed import Job
from ..lab.arguments import check_choice
from ..models import Llama

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
