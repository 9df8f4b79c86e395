"""`run`: a setup's speed, memory and loss, as one row."""

import gc
import itertools
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from helpers.lab import bench, device, peak_memory
from helpers.lab.memory import GIB
from helpers.lab.timing import synchronize
from helpers.models.llama import preset

from .flops import shares
from .setup import Setup
from .training import Trainer

LOSS_STEPS = 8
SEQUENCES = 4  # different ones that the loss is followed on; random tokens can only be learnt by heart
LONGEST_S, LEAST = 40.0, 5  # timed steps fill no more seconds than that, though there are at least so many of them


def run(setup: Setup, *, steps: int = 20, warmup: int = 1, loss_steps: int = LOSS_STEPS) -> dict[str, Any]:
    """Train by a setup on `device()`, and return its row; what the row holds is said by `measure`."""
    return measure(lambda: Trainer(setup).step, setup, steps=steps, warmup=warmup, loss_steps=loss_steps)


def measure(
    build: Callable[[], Callable[[Tensor], Tensor]],
    setup: Setup,
    *,
    steps: int = 20,
    warmup: int = 1,
    loss_steps: int = LOSS_STEPS,
) -> dict[str, Any]:
    """A row about the step that `build` makes, which trains on a batch of tokens (B, T + 1) and returns the loss:
    speed, memory and the loss after `loss_steps` steps on fixed tokens.

    Those steps come first, and warm up too; then `steps` steps on random tokens of full length are timed, the copy of
    the tokens included. Where a step takes so long that they would fill more than 40 seconds (20 of them, if one takes
    over 2), fewer are timed, at least 5: `n` says how many. `compile_s` is what the first step took more than a timed
    one. The peak is over all steps but the first, whose compiling and tuning needs memory of its own, and counts what
    was allocated since `build` was called.
    """
    held = _held()
    step = build()
    curve, took_s = [], []
    for tokens in itertools.islice(fixed_tokens(setup), max(loss_steps, 1)):
        began = time.perf_counter()
        curve.append(float(step(tokens)))
        took_s.append(time.perf_counter() - began)
        if len(curve) == 1:
            _forget_peak()
    batches = itertools.cycle(random_tokens(setup, SEQUENCES))
    timing = bench(lambda: step(next(batches)), repeat=_affordable(steps, min(took_s)), warmup=warmup, seconds=0.0)
    tokens_per_s = setup.batch * setup.sequence / timing.median_ms * 1e3
    return {
        "tokens_per_s": tokens_per_s,
        "step_ms": timing.median_ms,
        "p20_ms": timing.p20_ms,
        "p80_ms": timing.p80_ms,
        "n": timing.n,
        "peak_gib": _peak_gib(lambda: step(next(batches)), held),
        **shares(setup.model, setup.sequence, tokens_per_s),
        "compile_s": max(took_s[0] - timing.median_ms / 1e3, 0.0),
        "loss": _last(curve),
    }


def loss_curve(setup: Setup, steps: int = LOSS_STEPS) -> list[float]:
    """The loss of each step on the fixed tokens, from the setup's seed."""
    trainer = Trainer(setup)
    return [float(trainer.step(tokens)) for tokens in itertools.islice(fixed_tokens(setup), steps)]


def fixed_tokens(setup: Setup) -> Iterator[Tensor]:
    """Four sequences in turn, without end, each filling its batch: the mean loss and its gradient don't depend on the
    batch, so setups of any batch size walk the same curve."""
    sequences = draw(setup, SEQUENCES, seed=setup.seed + 1).split(1)
    for sequence in itertools.cycle(sequences):
        yield sequence.expand(setup.batch, -1)


def random_tokens(setup: Setup, batches: int) -> list[Tensor]:
    """So many different batches (B, T + 1) on the device."""
    return list(draw(setup, batches * setup.batch, seed=setup.seed + 2).split(setup.batch))


def draw(setup: Setup, rows: int, seed: int) -> Tensor:
    """Uniformly random tokens (rows, T + 1), the same on every device."""
    generator = torch.Generator().manual_seed(seed)
    shape = (rows, setup.sequence + 1)
    return torch.randint(preset(setup.model)["vocab_size"], shape, generator=generator).to(device())


def _last(curve: list[float]) -> float:
    """The mean over the last pass through the fixed sequences."""
    last = curve[-SEQUENCES:]
    return sum(last) / len(last)


def _affordable(steps: int, step_s: float) -> int:
    """How many of `steps` are timed if one takes so long."""
    return min(steps, max(int(LONGEST_S / step_s), LEAST))


def _held() -> int:
    """Bytes in use on the device now; 0 on a CPU, where `_peak_gib` counts from its call on."""
    if device().type != "cuda":
        return 0
    gc.collect()  # what nobody can reach would be counted here, and be gone by the time of the peak
    return torch.cuda.memory_allocated()


def _forget_peak() -> None:
    if device().type == "cuda":
        synchronize()
        torch.cuda.reset_peak_memory_stats()


def _peak_gib(step: Callable[[], Tensor], held: int) -> float:
    """On CUDA of all steps since `_forget_peak`, the capture of a graph included, less what was held before; on a CPU
    of one more step, without what lasts between steps."""
    if device().type == "cuda":
        synchronize()
        return (torch.cuda.max_memory_allocated() - held) / GIB
    return peak_memory(step).peak_gib
