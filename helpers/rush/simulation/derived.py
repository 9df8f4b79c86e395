"""What a training step must hold in memory, derived: a replay of what `helpers.rush.distributed` makes and frees.

    peak = rank_peak(Job(strategy="zero3", model="llama-3.1-8b", precision="amp-bf16", batch=8, sequence=2048), ranks=8)
    peak.bytes, peak.moment, peak.parts

It knows weights by their sizes, activations by formula, and the order of a step; it runs no operation, so an answer
takes a millisecond. `rank.rank_memory` counts or measures the same step.
"""

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, field

from helpers.rush.distributed import Job

from .shapes import FP32, Activations, Shapes, elements, largest, share

STEP_COUNTER = 512  # AdamW's count of steps, one for each weight: 4 bytes, in the allocator's smallest block


@dataclass(frozen=True)
class Peak:
    """The most bytes that a rank holds in a step, at which moment of it, and what for."""

    bytes: int
    moment: str
    parts: dict[str, int]


@dataclass
class Allocations:
    """Bytes held now, by what they are for, and how they stood when together they were the most."""

    parts: dict[str, int] = field(default_factory=dict)
    peak: dict[str, int] = field(default_factory=dict)
    moment: str = ""  # of the peak

    def add(self, moment: str, **sizes: int) -> None:
        """Allocate bytes for each part."""
        for part, size in sizes.items():
            self.parts[part] = self.parts.get(part, 0) + size
        if sum(self.parts.values()) > sum(self.peak.values()):
            self.peak, self.moment = dict(self.parts), moment

    def free(self, **sizes: int) -> None:
        for part, size in sizes.items():
            self.parts[part] -= size

    @contextlib.contextmanager
    def during(self, moment: str, **sizes: int) -> Iterator[None]:
        """Allocate bytes that are freed at the end of the block."""
        self.add(moment, **sizes)
        yield
        self.free(**sizes)

    def spike(self, moment: str, **sizes: int) -> None:
        """Allocate bytes and free them at once."""
        self.add(moment, **sizes)
        self.free(**sizes)

    def block_forward(self, act: Activations, checkpointing: bool) -> None:
        """A block's forward, and what it leaves for backward: its input if it is checkpointed, else all it saves."""
        if checkpointing:
            self.spike("forward", activations=act.block_forward_unsaved)
            self.add("forward", activations=act.stream)
        else:
            self.add("forward", activations=act.block)
            self.spike("forward", activations=act.block_forward - act.stream)


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
    own = share(shapes.weights, ranks) if sharded else elements(shapes.weights)
    held = Allocations()
    held.add(
        "at rest",
        parameters=FP32 * own,
        optimizer=2 * FP32 * own + STEP_COUNTER * len(shapes.weights),
        positions=FP32 * shapes.max_length * shapes.head_dim,  # cos and sin
        tokens=8 * sequences * (job.sequence + 1),
        gradients=FP32 * own if job.strategy == "ddp" else 0,  # DDP's buckets are there from the start
    )
    if sharded:
        ShardedStep(held, act, ranks, job.strategy == "zero3", job.checkpointing == "full").step()
    else:
        ReplicatedStep(held, act, job.strategy == "ddp", job.checkpointing == "full").step()
    return Peak(sum(held.peak.values()), held.moment, {part: size for part, size in held.peak.items() if size})


@dataclass
class ReplicatedStep:
    """A step of a rank that has all parameters in fp32. In bf16, autocast copies each weight that it multiplies by."""

    held: Allocations
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
        act, held = self.act, self.held
        with held.during("forward", activations=act.stream):
            for _ in range(act.shapes.layers):
                held.add("forward", weight_copies=self.block_copy)
                held.block_forward(act, self.checkpointing)

    def head(self) -> None:
        act, held = self.act, self.held
        held.add("head", activations=act.norm, weight_copies=self.table_copy)
        held.spike("head", logits=act.logits)
        if self.checkpointing:  # backward makes the blocks' copies again; autocast drops these where it ends
            held.free(weight_copies=act.shapes.layers * self.block_copy)
        held.spike("loss", logits=act.loss)
        with held.during("backward of the head", logits=act.logits, activations=act.stream):
            self.new_gradient("backward of the head", self.table, waits=act.shapes.tied)
        held.free(activations=act.norm, weight_copies=self.table_copy)

    def block_backward(self) -> None:
        act, held = self.act, self.held
        if self.checkpointing:
            held.add("recomputation", activations=act.block, weight_copies=self.block_copy)
        with held.during("backward", activations=act.feed_forward_backward):
            self.new_gradient("backward", self.largest)
        held.free(activations=act.block, weight_copies=self.block_copy)
        if not self.ddp:
            held.add("backward", gradients=self.block - self.largest)
        held.spike("backward", activations=act.norm_backward)
        if self.checkpointing:
            held.free(activations=act.stream)

    def embedding_backward(self) -> None:
        """In fp32: the embedding's result was cast, not the weight. A tied one's gradient is added to the head's."""
        act, held, moment = self.act, self.held, "backward of the embedding"
        held.spike(moment, activations=act.wide + act.stream, temporary=self.table)
        if act.shapes.tied:
            held.spike(moment, temporary=2 * self.table)
        elif not self.ddp:
            held.add(moment, gradients=self.table)

    def new_gradient(self, moment: str, size: int, waits: bool = False) -> None:
        """A weight's gradient, first in the type of compute. DDP copies it to its bucket once it is whole."""
        copy = int(self.cast * size)
        self.held.spike(moment, temporary=copy + size)
        if waits or not self.ddp:
            self.held.add(moment, **{"temporary" if self.ddp else "gradients": size})


@dataclass
class ShardedStep:
    """A step of a rank under FSDP2. `again`: gather parameters for backward anew (zero3).

    Gathering a unit fills a flat buffer, and copies the weights out of it. In forward the buffer lives until the next
    unit's is filled, so that copying overlaps gathering; in backward the next unit's is filled ahead. A unit's
    gradients are copied to an fp32 buffer to be summed and cut, which lives until the next unit's.
    """

    held: Allocations
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
        self.held.add("at rest", gathered=0, flat=0, reducing=0, unreduced=0)
        self.forward()
        self.head()
        for number in reversed(range(shapes.layers)):
            following = self.blocks[number - 1] if number else self.first
            self.block_backward(self.blocks[number], following)
        self.embedding_backward()

    def forward(self) -> None:
        act, held, shapes = self.act, self.held, self.act.shapes
        if shapes.tied:
            self.gather("forward", self.last)
        else:
            self.gather("forward", self.first)
            self.reshard(self.first)
        with held.during("forward", activations=act.stream):
            for block in self.blocks:
                self.gather("forward", block)
                held.block_forward(act, self.checkpointing)
                self.reshard(block)

    def head(self) -> None:
        act, held, moment = self.act, self.held, "backward of the head"
        if not act.shapes.tied:
            self.gather("head", self.last)
        held.add("head", activations=act.norm)
        held.spike("head", logits=act.logits)
        self.drop_flat()
        held.spike("loss", logits=act.loss)
        with held.during(moment, logits=act.logits):
            if self.again:
                self.prefetch(moment, self.blocks[-1])
            held.add(moment, unreduced=self.gathered_bytes([act.shapes.table]))
            held.spike(moment, activations=act.stream)
        held.spike(moment, activations=act.norm_backward - act.norm)
        held.free(activations=act.norm)
        if not act.shapes.tied:
            self.free_gathered(self.last)
            self.reduce(moment, self.last)

    def block_backward(self, block: list, following: list) -> None:
        act, held = self.act, self.held
        if self.again:
            held.add("backward", gathered=self.gathered_bytes(block))
            self.drop_flat()
            if following:
                self.prefetch("backward", following)
        if self.checkpointing:
            held.add("recomputation", activations=act.block)
        first = self.gathered_bytes(largest(block))
        held.add("backward", unreduced=first)
        held.spike("backward", activations=act.feed_forward_backward)
        held.free(activations=act.block)
        held.add("backward", unreduced=self.gathered_bytes(block) - first)
        held.spike("backward", activations=act.norm_backward)
        self.free_gathered(block)
        self.reduce("backward", block)
        if self.checkpointing:
            held.free(activations=act.stream)

    def embedding_backward(self) -> None:
        held, table, moment = self.held, [self.act.shapes.table], "backward of the embedding"
        if self.again and self.first:
            held.add(moment, gathered=self.gathered_bytes(table))
            self.drop_flat()
        if self.first:
            held.add(moment, unreduced=self.gathered_bytes(table))
        else:  # to be added to the head's
            held.spike(moment, temporary=2 * self.gathered_bytes(table))
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
        self.held.add(moment, flat=self.flat)
        self.held.add(moment, gathered=self.gathered_bytes(unit))
        self.held.free(flat=before)

    def prefetch(self, moment: str, unit: list) -> None:
        self.flat = self.act.itemsize * share(unit, self.ranks) * self.ranks
        self.held.add(moment, flat=self.flat)

    def drop_flat(self) -> None:
        self.held.free(flat=self.flat)
        self.flat = 0

    def reshard(self, unit: list) -> None:
        if self.again:
            self.free_gathered(unit)

    def free_gathered(self, unit: list) -> None:
        self.held.free(gathered=self.gathered_bytes(unit))

    def reduce(self, moment: str, unit: list) -> None:
        """Copy a unit's gradients to a buffer in fp32, whole, and keep this rank's part of the sum."""
        self.held.free(reducing=self.reducing)
        part = FP32 * share(unit, self.ranks)
        self.reducing = part * self.ranks
        self.held.add(moment, reducing=self.reducing)
        longest = self.gathered_bytes(largest(unit))  # held until the part is there
        self.held.free(unreduced=self.gathered_bytes(unit) - longest)
        self.held.add(moment, gradients=part)
        self.held.free(unreduced=longest)
