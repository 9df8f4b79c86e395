"""The trainer of a job on this rank, the loop of all strategies, and its row."""

import statistics
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from ..lab.memory import GIB
from ..lab.timing import each
from ..models.llama import preset
from ..training.trainer import Trainer
from . import strategies
from .strategies import Job


def train(job: Job, device: torch.device) -> dict[str, Any]:
    """Train on this rank, as one of the joined group; the row is the same on all ranks but for the time.

    `step_ms` is the median step without the first, which allocates. Bytes and peaks are maxima over the ranks.
    """
    ranks = dist.get_world_size()
    mesh = None if job.strategy in ("single", "ddp") else init_device_mesh(device.type, (ranks,))
    trainer = build_trainer(job, device, mesh)
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    losses, norms = [], []

    def step(number: int) -> None:
        losses.append(trainer.step(tokens_of(job, number, dist.get_rank(), ranks, device)))
        norms.append(full(trainer.norm))

    step_ms = each(range(job.steps), step, device)
    peak = {"peak_gib": torch.cuda.max_memory_allocated() / GIB} if device.type == "cuda" else {}
    return {
        "strategy": job.strategy,
        "step_ms": statistics.median(step_ms[1:] or step_ms),
        "losses": _averaged(losses),
        "gradient_norms": _averaged(norms),
        **_largest(state_bytes(trainer.model, trainer.optimizer) | peak, device),
    }


def build_trainer(
    job: Job, device: torch.device, mesh: DeviceMesh | None, *, lay_out_on: str | None = "meta"
) -> Trainer:
    """What trains a job on this rank's tokens (B, T + 1); `lay_out_on` is for `strategies.build_model`.

    AdamW is fused: the unfused one allocates temporary copies as large as its state.
    """
    model = strategies.build_model(job, device, mesh, lay_out_on=lay_out_on)
    optimizer = torch.optim.AdamW(model.parameters(), lr=job.learning_rate, fused=True)
    return Trainer(model, loss_of(job, model), optimizer, clip=job.clip)


def loss_of(job: Job, model: nn.Module) -> Callable[[Tensor], tuple[Tensor]]:
    """The loss of a step, whose gradient is that of the last micro-batch: the others' are added up before."""

    def loss(tokens: Tensor) -> tuple[Tensor]:
        *before, last = tokens.chunk(job.accumulate)
        total = torch.zeros((), device=tokens.device)
        for part in before:
            with strategies.synchronising(model, False):
                share = strategies.cross_entropy(job, model, part) / job.accumulate
                share.backward()
            total += share.detach()
        with strategies.synchronising(model, True):
            return (total + strategies.cross_entropy(job, model, last) / job.accumulate,)

    return loss


def full(tensor: Tensor) -> Tensor:
    """A DTensor gathered from all ranks; a plain tensor as it is."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def tokens_of(job: Job, step: int, rank: int, ranks: int, device: torch.device) -> Tensor:
    """This rank's part (B, T + 1) of a step's random tokens."""
    generator = torch.Generator().manual_seed(job.seed * 1_000_003 + step)
    size = (job.batch, job.sequence + 1)
    tokens = torch.randint(preset(job.model)["vocab_size"], size, generator=generator).to(device)
    return tokens.chunk(ranks)[rank]


def state_bytes(model: nn.Module, optimizer: Optimizer) -> dict[str, int]:
    """Bytes of this rank's parameters, gradients and optimizer state."""
    tensors = {
        "parameter_bytes": list(model.parameters()),
        "gradient_bytes": [weight.grad for weight in model.parameters() if weight.grad is not None],
        "optimizer_bytes": [t for state in optimizer.state.values() for t in state.values() if isinstance(t, Tensor)],
    }
    local = {name: [t.to_local() if isinstance(t, DTensor) else t for t in of] for name, of in tensors.items()}
    return {name: sum(t.nbytes for t in of) for name, of in local.items()}


def _averaged(values: list[Tensor]) -> list[float]:
    """Means over the ranks, by one collective after the loop, so that training itself never synchronizes."""
    stacked = torch.stack(values).double()
    dist.all_reduce(stacked)
    return (stacked / dist.get_world_size()).tolist()


def _largest(numbers: dict[str, float], device: torch.device) -> dict[str, float]:
    values = torch.tensor(list(numbers.values()), dtype=torch.float64, device=device)
    dist.all_reduce(values, dist.ReduceOp.MAX)
    return {name: type(number)(value) for (name, number), value in zip(numbers.items(), values.tolist(), strict=True)}
