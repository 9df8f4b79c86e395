"""What to train, how, and on what: checked before anything is allocated."""

from dataclasses import dataclass
from pathlib import Path

import torch

from helpers.lab.arguments import check_positive
from helpers.models.llama import preset

STRATEGIES = {
    "single": "one rank",
    "ddp": "every rank has everything; gradients are averaged",
    "zero2": "gradients and optimizer state are sharded; parameters are gathered once a pass",
    "zero3": "parameters too: gathered before each use, freed after it",
    "tp": "each rank has a part of every layer's heads and channels",
}
BACKENDS = ("gloo", "nccl")
PRECISIONS = ("fp32", "amp-bf16")
CHECKPOINTINGS = ("none", "full", "selective")


@dataclass(frozen=True, kw_only=True)
class Job:
    """One training run. The same job on any number of ranks, by any strategy, trains on the same tokens."""

    strategy: str = "ddp"
    model: str = "tiny"
    backend: str = "gloo"  # nccl needs CUDA; gloo runs on the CPU
    batch: int = 8  # sequences of a step, over all ranks
    sequence: int = 64
    accumulate: int = 1  # micro-batches of a step
    steps: int = 5
    precision: str = "fp32"  # amp-bf16: fp32 parameters and optimizer state, bf16 compute
    checkpointing: str = "none"  # what blocks compute again in backward: as in `helpers.rush.checkpointing`
    bucket_mib: float = 25.0  # ddp: gradients are averaged in pieces of so much
    sync_each: bool = False  # average gradients after each micro-batch, not once a step
    learning_rate: float = 1e-3
    clip: float = 1.0  # the gradient's norm at most
    seed: int = 0
    save: str | None = None  # a folder to write a checkpoint to, after the last step
    resume: str | None = None  # a folder to read one from; `steps` more are done
    timeout_s: float = 50.0  # how long a rank waits for one that is gone

    def check(self, ranks: int, ranks_here: int | None = None) -> None:
        """A `ValueError` for the first thing that can't work on so many ranks, `ranks_here` of them on this machine."""
        sizes = preset(self.model)
        _among("strategy", self.strategy, tuple(STRATEGIES))
        _among("backend", self.backend, BACKENDS)
        _among("precision", self.precision, PRECISIONS)
        _among("checkpointing", self.checkpointing, CHECKPOINTINGS)
        check_positive(ranks=ranks, batch=self.batch, sequence=self.sequence, steps=self.steps)
        check_positive(accumulate=self.accumulate)
        for field in ("bucket_mib", "learning_rate", "clip", "timeout_s"):
            if not getattr(self, field) > 0:
                raise ValueError(f"{field} is {getattr(self, field)}; it must be above 0")
        if self.sequence > (longest := sizes.get("max_length", 131072)):
            raise ValueError(f"sequence is {self.sequence}; {self.model} has {longest} positions")
        if self.strategy == "single" and ranks != 1:
            raise ValueError(f"strategy 'single' has one rank, not {ranks}")
        pieces = self.data_ranks(ranks) * self.accumulate
        if self.batch % pieces:
            raise ValueError(
                f"batch is {self.batch}; it must be a multiple of {pieces}: "
                f"{self.data_ranks(ranks)} ranks × {self.accumulate} micro-batches"
            )
        if self.strategy == "tp":
            self._check_divisible(ranks, sizes)
        if self.resume and not (Path(self.resume) / ".metadata").is_file():
            raise ValueError(f"there is no checkpoint in {self.resume}")
        if self.backend == "nccl":
            _check_gpus(ranks_here or ranks)

    def data_ranks(self, ranks: int) -> int:
        """How many ranks see sequences of their own."""
        return 1 if self.strategy == "tp" else ranks

    def _check_divisible(self, ranks: int, sizes: dict) -> None:
        split = {name: sizes[name] for name in ("heads", "kv_heads", "feedforward_size", "vocab_size")}
        for name, size in (split | {"sequence": self.sequence}).items():
            if size % ranks:
                raise ValueError(f"{name} is {size}; tensor parallelism over {ranks} ranks needs a multiple of {ranks}")


def _among(name: str, value: str, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise ValueError(f"unknown {name} {value!r}; valid: {', '.join(allowed)}")


def _check_gpus(ranks: int) -> None:
    if not torch.cuda.is_available():
        raise ValueError("backend 'nccl' needs CUDA, and this machine has none; 'gloo' runs on the CPU")
    if ranks > torch.cuda.device_count():
        raise ValueError(f"backend 'nccl' needs a GPU for each rank: {ranks} ranks, {torch.cuda.device_count()} GPUs")
