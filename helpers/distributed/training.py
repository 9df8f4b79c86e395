"""The training loop of all strategies, and its row."""

import itertools
import statistics
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from ..lab.memory import GIB
from ..lab.timing import between_ms, moment, synchronize
from ..models.llama import preset
from ..training.step import advance
from . import strategies
from .strategies import Job

Batches = list[tuple[Tensor, Tensor]]  # tokens and targets, (B, T) each, of the micro-batches of a step


def train(job: Job, device: torch.device) -> dict[str, Any]:
    """Train on this rank, as one of the joined group; the row is the same on all ranks but for the time.

    `step_ms` is the median step without the first, which allocates. Bytes and peaks are maxima over the ranks.
    """
    ranks = dist.get_world_size()
    mesh = None if job.strategy in ("single", "ddp") else init_device_mesh(device.type, (ranks,))
    model = strategies.build_model(job, device, mesh)
    optimizer = optimizer_of(job, model)
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    losses, norms, marks = [], [], [moment(device)]
    for step in range(job.steps):
        batches = micro_batches(job, step, dist.get_rank(), ranks, device)
        loss, norm = train_step(job, model, optimizer, batches)
        losses.append(loss)
        norms.append(norm)
        marks.append(moment(device))
    synchronize(device)
    peak = {"peak_gib": torch.cuda.max_memory_allocated() / GIB} if device.type == "cuda" else {}
    step_ms = [between_ms(start, end) for start, end in itertools.pairwise(marks)]
    return {
        "strategy": job.strategy,
        "step_ms": statistics.median(step_ms[1:] or step_ms),
        "losses": _averaged(losses),
        "gradient_norms": _averaged(norms),
        **_largest(state_bytes(model, optimizer) | peak, device),
    }


def optimizer_of(job: Job, model: nn.Module) -> Optimizer:
    """AdamW, fused: the unfused one allocates temporary copies as large as its state."""
    return torch.optim.AdamW(model.parameters(), lr=job.learning_rate, fused=True)


def train_step(job: Job, model: nn.Module, optimizer: Optimizer, batches: Batches) -> tuple[Tensor, Tensor]:
    """One step over the micro-batches: this rank's mean loss, and the global gradient norm before clipping."""
    optimizer.zero_grad(set_to_none=True)
    total = torch.zeros((), device=batches[0][0].device)
    for number, (tokens, targets) in enumerate(batches, 1):
        with strategies.synchronising(model, number == len(batches)):
            loss = strategies.cross_entropy(job, model, tokens, targets) / len(batches)
            loss.backward()
        total += loss.detach()
    return total, full(advance(optimizer, clip=job.clip))


def full(tensor: Tensor) -> Tensor:
    """A DTensor gathered from all ranks; a plain tensor as it is."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def micro_batches(job: Job, step: int, rank: int, ranks: int, device: torch.device) -> Batches:
    """This rank's part of a step's random tokens, as tokens and targets (B, T) for each micro-batch."""
    generator = torch.Generator().manual_seed(job.seed * 1_000_003 + step)
    size = (job.batch, job.sequence + 1)
    tokens = torch.randint(preset(job.model)["vocab_size"], size, generator=generator).to(device)
    return [(part[:, :-1], part[:, 1:]) for part in tokens.chunk(ranks)[rank].chunk(job.accumulate)]


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
