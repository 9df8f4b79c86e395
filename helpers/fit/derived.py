"""Peak memory of a training step by formula: a replay of what `helpers.distributed` allocates and frees.

    peak = rank_peak(Job(strategy="zero3", model="llama-3.1-8b", precision="amp-bf16", batch=8, sequence=2048), ranks=8)
    peak.bytes, peak.moment, peak.parts

It uses the sizes of the weights, formulas for activations, and the order of a step. It runs no operation, so it takes a
millisecond. `rank.rank_memory` counts or measures the same step.
"""

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, field

from helpers.distributed import Job

from .shapes import FP32, Activations, Shapes, elements, largest, share

STEP_COUNTER = 512  # AdamW's count of steps, one for each weight: 4 bytes, in the allocator's smallest block


@dataclass(frozen=True)
class Peak:
    """A rank's peak memory in a step: bytes, the moment of the step, and the bytes of each part."""

    bytes: int
    moment: str
    parts: dict[str, int]


@dataclass
class Allocations:
    """Bytes allocated now, by part, and a copy of them from the moment at which their sum was largest."""

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
        """A block's forward. Saved for backward: its input if it is checkpointed, else all its saved activations."""
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
    local = share(shapes.weights, ranks) if sharded else elements(shapes.weights)
    memory = Allocations()
    memory.add(
        "at rest",
        parameters=FP32 * local,
        optimizer=2 * FP32 * local + STEP_COUNTER * len(shapes.weights),
        positions=FP32 * shapes.max_length * shapes.head_dim,  # cos and sin
        tokens=8 * sequences * (job.sequence + 1),
        gradients=FP32 * local if job.strategy == "ddp" else 0,  # DDP's buckets are allocated from the start
    )
    if sharded:
        ShardedStep(memory, act, ranks, job.strategy == "zero3", job.checkpointing == "full").step()
    else:
        ReplicatedStep(memory, act, job.strategy == "ddp", job.checkpointing == "full").step()
    return Peak(sum(memory.peak.values()), memory.moment, {part: size for part, size in memory.peak.items() if size})


@dataclass
class ReplicatedStep:
    """A step of a rank that has all parameters in fp32. In bf16, autocast copies each weight that it multiplies by."""

    memory: Allocations
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
        act, memory = self.act, self.memory
        with memory.during("forward", activations=act.stream):
            for _ in range(act.shapes.layers):
                memory.add("forward", weight_copies=self.block_copy)
                memory.block_forward(act, self.checkpointing)

    def head(self) -> None:
        act, memory = self.act, self.memory
        memory.add("head", activations=act.norm, weight_copies=self.table_copy)
        memory.spike("head", logits=act.logits)
        if self.checkpointing:  # backward makes the blocks' copies again; autocast drops these where it ends
            memory.free(weight_copies=act.shapes.layers * self.block_copy)
        memory.spike("loss", logits=act.loss)
        with memory.during("backward of the head", logits=act.logits, activations=act.stream):
            self.new_gradient("backward of the head", self.table, waits=act.shapes.tied)
        memory.free(activations=act.norm, weight_copies=self.table_copy)

    def block_backward(self) -> None:
        act, memory = self.act, self.memory
        if self.checkpointing:
            memory.add("recomputation", activations=act.block, weight_copies=self.block_copy)
        with memory.during("backward", activations=act.feed_forward_backward):
            self.new_gradient("backward", self.largest)
        memory.free(activations=act.block, weight_copies=self.block_copy)
        if not self.ddp:
            memory.add("backward", gradients=self.block - self.largest)
        memory.spike("backward", activations=act.norm_backward)
        if self.checkpointing:
            memory.free(activations=act.stream)

    def embedding_backward(self) -> None:
        """In fp32, as autocast cast the embedding's result and not its weight. Tied: added to the head's gradient."""
        act, memory, moment = self.act, self.memory, "backward of the embedding"
        memory.spike(moment, activations=act.wide + act.stream, temporary=self.table)
        if act.shapes.tied:
            memory.spike(moment, temporary=2 * self.table)
        elif not self.ddp:
            memory.add(moment, gradients=self.table)

    def new_gradient(self, moment: str, size: int, waits: bool = False) -> None:
        """A weight's gradient, first in the compute dtype. DDP copies it to its bucket once it is complete."""
        copy = int(self.cast * size)
        self.memory.spike(moment, temporary=copy + size)
        if waits or not self.ddp:
            self.memory.add(moment, **{"temporary" if self.ddp else "gradients": size})


@dataclass
class ShardedStep:
    """A step of a rank under FSDP2. `again`: gather parameters again for backward (zero3).

    Gathering a unit fills a flat buffer and copies the weights out of it. In forward the buffer is freed after the next
    unit's is filled, so that copying overlaps with gathering; in backward the next unit's is prefetched. A unit's
    gradients are copied to an fp32 buffer for the reduce-scatter, which is freed at the next unit's.
    """

    memory: Allocations
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
        self.memory.add("at rest", gathered=0, flat=0, reducing=0, unreduced=0)
        self.forward()
        self.head()
        for number in reversed(range(shapes.layers)):
            following = self.blocks[number - 1] if number else self.first
            self.block_backward(self.blocks[number], following)
        self.embedding_backward()

    def forward(self) -> None:
        act, memory, shapes = self.act, self.memory, self.act.shapes
        if shapes.tied:
            self.gather("forward", self.last)
        else:
            self.gather("forward", self.first)
            self.reshard(self.first)
        with memory.during("forward", activations=act.stream):
            for block in self.blocks:
                self.gather("forward", block)
                memory.block_forward(act, self.checkpointing)
                self.reshard(block)

    def head(self) -> None:
        act, memory, moment = self.act, self.memory, "backward of the head"
        if not act.shapes.tied:
            self.gather("head", self.last)
        memory.add("head", activations=act.norm)
        memory.spike("head", logits=act.logits)
        self.drop_flat()
        memory.spike("loss", logits=act.loss)
        with memory.during(moment, logits=act.logits):
            if self.again:
                self.prefetch(moment, self.blocks[-1])
            memory.add(moment, unreduced=self.gathered_bytes([act.shapes.table]))
            memory.spike(moment, activations=act.stream)
        memory.spike(moment, activations=act.norm_backward - act.norm)
        memory.free(activations=act.norm)
        if not act.shapes.tied:
            self.free_gathered(self.last)
            self.reduce(moment, self.last)

    def block_backward(self, block: list, following: list) -> None:
        act, memory = self.act, self.memory
        if self.again:
            memory.add("backward", gathered=self.gathered_bytes(block))
            self.drop_flat()
            if following:
                self.prefetch("backward", following)
        if self.checkpointing:
            memory.add("recomputation", activations=act.block)
        first = self.gathered_bytes(largest(block))
        memory.add("backward", unreduced=first)
        memory.spike("backward", activations=act.feed_forward_backward)
        memory.free(activations=act.block)
        memory.add("backward", unreduced=self.gathered_bytes(block) - first)
        memory.spike("backward", activations=act.norm_backward)
        self.free_gathered(block)
        self.reduce("backward", block)
        if self.checkpointing:
            memory.free(activations=act.stream)

    def embedding_backward(self) -> None:
        memory, table, moment = self.memory, [self.act.shapes.table], "backward of the embedding"
        if self.again and self.first:
            memory.add(moment, gathered=self.gathered_bytes(table))
            self.drop_flat()
        if self.first:
            memory.add(moment, unreduced=self.gathered_bytes(table))
        else:  # temporary: it is added to the head's gradient
            memory.spike(moment, temporary=2 * self.gathered_bytes(table))
        unit = self.first or self.last
        self.free_gathered(unit)
        self.reduce(moment, unit)

    def gathered_bytes(self, unit: list) -> int:
        return self.act.itemsize * elements(unit)

    def gather(self, moment: str, unit: list) -> None:
        """Fill a flat buffer from every rank's shard, copy the weights out, and free the previous buffer."""
        part = self.act.itemsize * share(unit, self.ranks)
        before = self.flat
        self.flat = part * self.ranks
        self.memory.add(moment, flat=self.flat)
        self.memory.add(moment, gathered=self.gathered_bytes(unit))
        self.memory.free(flat=before)

    def prefetch(self, moment: str, unit: list) -> None:
        self.flat = self.act.itemsize * share(unit, self.ranks) * self.ranks
        self.memory.add(moment, flat=self.flat)

    def drop_flat(self) -> None:
        self.memory.free(flat=self.flat)
        self.flat = 0

    def reshard(self, unit: list) -> None:
        if self.again:
            self.free_gathered(unit)

    def free_gathered(self, unit: list) -> None:
        self.memory.free(gathered=self.gathered_bytes(unit))

    def reduce(self, moment: str, unit: list) -> None:
        """Copy a unit's gradients to an fp32 buffer for the reduce-scatter, and store this rank's shard of the sum."""
        self.memory.free(reducing=self.reducing)
        part = FP32 * share(unit, self.ranks)
        self.reducing = part * self.ranks
        self.memory.add(moment, reducing=self.reducing)
        longest = self.gathered_bytes(largest(unit))  # freed after the shard is stored
        self.memory.free(unreduced=self.gathered_bytes(unit) - longest)
        self.memory.add(moment, gradients=part)
        self.memory.free(unreduced=longest)
