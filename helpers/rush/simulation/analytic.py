"""What a training step must hold in memory, derived: a replay of what `helpers.rush.distributed` makes and frees.

    peak = rank_peak(Job(strategy="zero3", model="llama-3.1-8b", precision="amp-bf16", batch=8, sequence=2048), ranks=8)
    peak.bytes, peak.moment, peak.parts

It knows weights by their sizes, activations by formula, and the order of a step; it runs no operation, so an answer
takes a millisecond. `memory.rank_memory` counts or measures the same step.
"""

from dataclasses import dataclass

from helpers.rush.distributed import Job

from .activations import FP32, Activations
from .shapes import Shapes, elements, largest, share
from .tally import Tally

STEP_COUNTER = 512  # AdamW's count of steps, one for each weight: 4 bytes, in the allocator's smallest block


@dataclass(frozen=True)
class Peak:
    """The most bytes that a rank holds in a step, at which moment of it, and what for."""

    bytes: int
    moment: str
    parts: dict[str, int]


def rank_peak(job: Job, ranks: int) -> Peak:
    """The peak of a rank of `ranks`, in any step but the first."""
    job.check(ranks)
    if job.strategy == "tp" or job.accumulate > 1 or job.checkpointing == "selective":
        given = f"strategy {job.strategy!r}, accumulate {job.accumulate}, checkpointing {job.checkpointing!r}"
        raise ValueError(f"{given}: memory is derived for single, ddp, zero2, zero3; for 1; for 'none' and 'full'")
    shapes = Shapes.of(job.model)
    sharded = job.strategy in ("zero2", "zero3")
    sequences = job.batch // job.data_ranks(ranks)
    act = Activations(shapes, sequences * job.sequence, {"fp32": 4, "amp-bf16": 2}[job.precision])
    held = share(shapes.weights, ranks) if sharded else elements(shapes.weights)
    tally = Tally()
    tally.add(
        "at rest",
        parameters=FP32 * held,
        optimizer=2 * FP32 * held + STEP_COUNTER * len(shapes.weights),
        positions=FP32 * shapes.max_length * shapes.head_dim,  # cos and sin
        tokens=8 * sequences * (job.sequence + 1),
        gradients=FP32 * held if job.strategy == "ddp" else 0,  # DDP's buckets are there from the start
    )
    if sharded:
        Sharded(tally, act, ranks, job.strategy == "zero3", job.checkpointing == "full").step()
    else:
        Whole(tally, act, job.strategy == "ddp", job.checkpointing == "full").step()
    return Peak(sum(tally.peak.values()), tally.moment, {part: size for part, size in tally.peak.items() if size})


@dataclass
class Whole:
    """A step of a rank that has all parameters in fp32. In bf16, autocast copies each weight that it multiplies by."""

    tally: Tally
    act: Activations
    ddp: bool
    checkpointing: bool

    def step(self) -> None:
        shapes = self.act.shapes
        casts = self.act.itemsize != FP32
        self.table = FP32 * elements([shapes.table])
        self.block = FP32 * elements(shapes.block)
        self.largest = FP32 * elements(largest(shapes.block))
        self.cast = self.act.itemsize / FP32 if casts else 0  # bytes of a copy for a byte of the weight
        self.block_copy = int(self.cast * FP32 * elements([w for w in shapes.block if w[1] > 1]))
        self.table_copy = int(self.cast * self.table)
        self.forward()
        self.head()
        for _ in range(shapes.layers):
            self.block_backward()
        self.embedding_backward()

    def forward(self) -> None:
        act, tally = self.act, self.tally
        with tally.during("forward", activations=act.stream):
            for _ in range(act.shapes.layers):
                tally.add("forward", weight_copies=self.block_copy)
                if self.checkpointing:
                    tally.touch("forward", activations=act.block_forward_unkept)
                    tally.add("forward", activations=act.stream)
                else:
                    tally.add("forward", activations=act.block)
                    tally.touch("forward", activations=act.block_forward - act.stream)

    def head(self) -> None:
        act, tally = self.act, self.tally
        tally.add("head", activations=act.norm, weight_copies=self.table_copy)
        tally.touch("head", logits=act.logits)
        if self.checkpointing:  # backward makes the blocks' copies again; autocast drops these where it ends
            tally.free(weight_copies=act.shapes.layers * self.block_copy)
        tally.touch("loss", logits=act.loss)
        with tally.during("backward of the head", logits=act.logits, activations=act.stream):
            self.new_gradient("backward of the head", self.table, waits=act.shapes.tied)
        tally.free(activations=act.norm, weight_copies=self.table_copy)

    def block_backward(self) -> None:
        act, tally = self.act, self.tally
        if self.checkpointing:
            tally.add("recomputation", activations=act.block, weight_copies=self.block_copy)
        with tally.during("backward", activations=act.feed_forward_backward):
            self.new_gradient("backward", self.largest)
        tally.free(activations=act.block, weight_copies=self.block_copy)
        if not self.ddp:
            tally.add("backward", gradients=self.block - self.largest)
        tally.touch("backward", activations=act.norm_backward)
        if self.checkpointing:
            tally.free(activations=act.stream)

    def embedding_backward(self) -> None:
        """In fp32: the embedding's result was cast, not the weight. A tied one's gradient is added to the head's."""
        act, tally, moment = self.act, self.tally, "backward of the embedding"
        tally.touch(moment, activations=act.wide + act.stream, temporary=self.table)
        if act.shapes.tied:
            tally.touch(moment, temporary=2 * self.table)
        elif not self.ddp:
            tally.add(moment, gradients=self.table)

    def new_gradient(self, moment: str, size: int, waits: bool = False) -> None:
        """A weight's gradient, first in the type of compute. DDP copies it to its bucket once it is whole."""
        copy = int(self.cast * size)
        self.tally.touch(moment, temporary=copy + size)
        if waits or not self.ddp:
            self.tally.add(moment, **{"temporary" if self.ddp else "gradients": size})


@dataclass
class Sharded:
    """A step of a rank under FSDP2. `again`: gather parameters for backward anew (zero3).

    Gathering a unit fills a flat buffer, and copies the weights out of it. In forward the buffer lives until the next
    unit's is filled, so that copying overlaps gathering; in backward the next unit's is filled ahead. A unit's
    gradients are copied to an fp32 buffer to be summed and cut, which lives until the next unit's.
    """

    tally: Tally
    act: Activations
    ranks: int
    again: bool
    checkpointing: bool

    def step(self) -> None:
        shapes = self.act.shapes
        self.blocks = [shapes.block] * shapes.layers
        self.first = [] if shapes.tied else [shapes.table]
        self.last = shapes.outside if shapes.tied else [shapes.table, (shapes.width, 1)]
        self.flat = self.reducing = 0
        self.tally.add("at rest", gathered=0, flat=0, reducing=0, unreduced=0)
        self.forward()
        self.head()
        for number in reversed(range(shapes.layers)):
            following = self.blocks[number - 1] if number else self.first
            self.block_backward(self.blocks[number], following)
        self.embedding_backward()

    def forward(self) -> None:
        act, tally, shapes = self.act, self.tally, self.act.shapes
        if shapes.tied:
            self.gather("forward", self.last)
        else:
            self.gather("forward", self.first)
            self.reshard(self.first)
        with tally.during("forward", activations=act.stream):
            for block in self.blocks:
                self.gather("forward", block)
                if self.checkpointing:
                    tally.touch("forward", activations=act.block_forward_unkept)
                    tally.add("forward", activations=act.stream)
                else:
                    tally.add("forward", activations=act.block)
                    tally.touch("forward", activations=act.block_forward - act.stream)
                self.reshard(block)

    def head(self) -> None:
        act, tally, moment = self.act, self.tally, "backward of the head"
        if not act.shapes.tied:
            self.gather("head", self.last)
        tally.add("head", activations=act.norm)
        tally.touch("head", logits=act.logits)
        self.drop_flat()
        tally.touch("loss", logits=act.loss)
        with tally.during(moment, logits=act.logits):
            if self.again:
                self.prefetch(moment, self.blocks[-1])
            tally.add(moment, unreduced=self.gathered_bytes([act.shapes.table]))
            tally.touch(moment, activations=act.stream)
        tally.touch(moment, activations=act.norm_backward - act.norm)
        tally.free(activations=act.norm)
        if not act.shapes.tied:
            self.free_gathered(self.last)
            self.reduce(moment, self.last)

    def block_backward(self, block: list, following: list) -> None:
        act, tally = self.act, self.tally
        if self.again:
            tally.add("backward", gathered=self.gathered_bytes(block))
            self.drop_flat()
            if following:
                self.prefetch("backward", following)
        if self.checkpointing:
            tally.add("recomputation", activations=act.block)
        first = self.gathered_bytes(largest(block))
        tally.add("backward", unreduced=first)
        tally.touch("backward", activations=act.feed_forward_backward)
        tally.free(activations=act.block)
        tally.add("backward", unreduced=self.gathered_bytes(block) - first)
        tally.touch("backward", activations=act.norm_backward)
        self.free_gathered(block)
        self.reduce("backward", block)
        if self.checkpointing:
            tally.free(activations=act.stream)

    def embedding_backward(self) -> None:
        tally, table, moment = self.tally, [self.act.shapes.table], "backward of the embedding"
        if self.again and self.first:
            tally.add(moment, gathered=self.gathered_bytes(table))
            self.drop_flat()
        if self.first:
            tally.add(moment, unreduced=self.gathered_bytes(table))
        else:  # to be added to the head's
            tally.touch(moment, temporary=2 * self.gathered_bytes(table))
        unit = self.first or self.last
        self.free_gathered(unit)
        self.reduce(moment, unit)

    def gathered_bytes(self, unit: list) -> int:
        return self.act.itemsize * elements(unit)

    def gather(self, moment: str, unit: list) -> None:
        """Fill a flat buffer from every rank's part, copy the weights out, and let go of the buffer before."""
        part = self.act.itemsize * share(unit, self.ranks)
        before = self.flat
        self.flat = part * self.ranks
        self.tally.add(moment, flat=self.flat)
        self.tally.add(moment, gathered=self.gathered_bytes(unit))
        self.tally.free(flat=before)

    def prefetch(self, moment: str, unit: list) -> None:
        self.flat = self.act.itemsize * share(unit, self.ranks) * self.ranks
        self.tally.add(moment, flat=self.flat)

    def drop_flat(self) -> None:
        self.tally.free(flat=self.flat)
        self.flat = 0

    def reshard(self, unit: list) -> None:
        if self.again:
            self.free_gathered(unit)

    def free_gathered(self, unit: list) -> None:
        self.tally.free(gathered=self.gathered_bytes(unit))

    def reduce(self, moment: str, unit: list) -> None:
        """Copy a unit's gradients to a buffer in fp32, whole, and keep this rank's part of the sum."""
        self.tally.free(reducing=self.reducing)
        part = FP32 * share(unit, self.ranks)
        self.reducing = part * self.ranks
        self.tally.add(moment, reducing=self.reducing)
        longest = self.gathered_bytes(largest(unit))  # held until the part is there
        self.tally.free(unreduced=self.gathered_bytes(unit) - longest)
        self.tally.add(moment, gradients=part)
        self.tally.free(unreduced=longest)
