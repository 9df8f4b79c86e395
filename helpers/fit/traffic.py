"""The bytes that ranks exchange in a training step, by formula, and the shapes of a Llama's weights.

    transfers(Job(strategy="zero3", model="llama-3.1-8b", precision="amp-bf16"), ranks=8)

An all-gather or reduce-scatter of S bytes over n ranks makes each rank send S·(n−1)/n, an all-reduce twice that, by any
algorithm that balances the ranks.
"""

import functools
import math
from dataclasses import dataclass

import torch

from helpers.distributed import Job
from helpers.models import Llama

GATHER, SCATTER, REDUCE = "all-gather", "reduce-scatter", "all-reduce"
FORWARD, BACKWARD, AFTER = "forward", "backward", "after"
ROUNDS = {GATHER: 1, SCATTER: 1, REDUCE: 2}  # how often (n−1)/n of the bytes leave a rank
FP32 = 4  # bytes of a number

Weights = list[tuple[int, int]]  # rows and columns of each; a norm's weight has one column


@dataclass(frozen=True)
class Shapes:
    """Rows and columns of a model's weights: of the embedding (and the head), of a block, and of all."""

    table: tuple[int, int]
    block: Weights
    layers: int
    tied: bool
    weights: Weights

    @classmethod
    @functools.cache
    def of(cls, name: str, layers: int | None = None) -> "Shapes":
        """The shapes of a preset, which is built without memory."""
        with torch.device("meta"):
            model = Llama.from_name(name, **({"layers": layers} if layers else {}))
        block, weights = (
            [(len(weight), weight[0].numel()) for weight in module.parameters()] for module in (model.layers[0], model)
        )
        tied = model.head.weight is model.embedding.weight
        return cls(tuple(model.embedding.weight.shape), block, len(model.layers), tied, weights)

    @property
    def width(self) -> int:
        return self.table[1]

    @property
    def last(self) -> Weights:
        """The final norm with the head, which are gathered together; a tied head is the embedding, too."""
        return [self.table, (self.width, 1)]


def elements(weights: Weights) -> int:
    return sum(rows * columns for rows, columns in weights)


def share(weights: Weights, ranks: int) -> int:
    """Elements of a rank's shard when each weight's rows are divided over ranks, padded to equal shards."""
    return sum(-(-rows // ranks) * columns for rows, columns in weights)


@dataclass(frozen=True)
class Transfer:
    """`count` collectives of one kind and purpose; `bytes` is the sum of their unsharded sizes."""

    what: str
    kind: str
    bytes: int
    count: int
    phase: str
    # What may overlap with computation: "all", "none", or all but the first or last collective.
    hides: str = "none"

    def sent(self, ranks: int) -> float:
        """Bytes that each rank sends and receives."""
        return ROUNDS[self.kind] * self.bytes * (ranks - 1) / ranks


def transfers(job: Job, ranks: int) -> list[Transfer]:
    """All transfers of a step over `ranks` ranks, in the order of the step, collectives of one purpose together."""
    job.check(ranks)
    if ranks == 1:
        return []
    shapes = Shapes.of(job.model, job.layers)
    derived = {"ddp": _ddp, "zero2": _zero, "zero3": _zero, "tp": _tp}[job.strategy](job, shapes, ranks)
    return [transfer for transfer in derived if transfer.bytes]


def _ddp(job: Job, shapes: Shapes, ranks: int) -> list[Transfer]:
    size = FP32 * elements(shapes.weights)
    buckets = max(1, math.ceil(size / (job.bucket_mib * 2**20)))
    return [Transfer("gradients", REDUCE, size, buckets, BACKWARD, "all but the last")]


def _zero(job: Job, shapes: Shapes, ranks: int) -> list[Transfer]:
    table = [] if shapes.tied else [[shapes.table]]
    body = table + [shapes.block] * shapes.layers
    itemsize = {"fp32": 4, "amp-bf16": 2}[job.precision]

    def unsharded(units: list, itemsize: int) -> int:
        return itemsize * ranks * sum(share(unit, ranks) for unit in units)

    passes = job.accumulate
    again = passes if job.strategy == "zero3" else 0
    every = [*body, shapes.last]
    return [
        Transfer(
            "parameters", GATHER, passes * unsharded(every, itemsize), passes * len(every), FORWARD, "all but the first"
        ),
        Transfer("parameters again", GATHER, again * unsharded(body, itemsize), again * len(body), BACKWARD, "all"),
        Transfer("gradients", SCATTER, unsharded(every, FP32), len(every), BACKWARD, "all but the last"),
        Transfer("gradient norms", REDUCE, FP32 * len(shapes.weights), 1, AFTER),
    ]


def _tp(job: Job, shapes: Shapes, ranks: int) -> list[Transfer]:
    """Two gathers and two scatters of the residual stream a block and pass; recomputation skips the last scatter."""
    if job.checkpointing == "selective":
        raise ValueError(
            "checkpointing is 'selective'; with tensor parallelism bytes are derived for 'none' and 'full'"
        )
    itemsize = {"fp32": 4, "amp-bf16": 2}[job.precision]
    tokens, layers = job.batch * job.sequence, shapes.layers
    stream, wide = tokens * shapes.width * itemsize, tokens * shapes.width * FP32
    norms = FP32 * shapes.width * (2 * layers + 1)
    passes = job.accumulate  # micro-batches: their tokens add up to the batch's

    def pair(what: str, gathers: int, scatters: int, phase: str) -> list[Transfer]:
        return [
            Transfer(what, GATHER, gathers * stream, gathers * passes, phase),
            Transfer(what, SCATTER, scatters * stream, scatters * passes, phase),
        ]

    again = layers if job.checkpointing == "full" else 0
    return [
        Transfer("embedding", SCATTER, wide, passes, FORWARD),
        *pair("stream", 2 * layers + 1, 2 * layers, FORWARD),
        Transfer("loss", REDUCE, 3 * tokens * FP32, 3 * passes, FORWARD),
        *pair("stream, recomputed", 2 * again, again, BACKWARD),
        *pair("gradient of the stream", 2 * layers, 2 * layers + 1, BACKWARD),
        Transfer("gradient of the embedding", GATHER, wide, passes, BACKWARD),
        # Each rank has partial gradients of the norms' weights; clipping and the step each reduce them.
        Transfer("gradients of the norms", REDUCE, 2 * norms, 2 * (2 * layers + 1), AFTER),
        Transfer("gradient norms", REDUCE, FP32 * len(shapes.weights), 1, AFTER),
    ]
