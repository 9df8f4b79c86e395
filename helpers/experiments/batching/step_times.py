"""Times of steps on many different batches: each batch by itself, and training steps of several variants in turn."""

import itertools
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ...lab import compare, device, each
from ...lab.records import Row
from ...lab.records.experiment import free_memory, is_out_of_memory
from ...lab.timing import queue_ahead, synchronize

QUEUED = 20  # batches that wait on the device before the first is timed: fewer kernels than CUDA queues, about 1,000
AHEAD = 40_000_000  # clock cycles, 20 to 40 ms: longer than the host takes to queue the work of so many batches


def device_ms(batches: Iterable[Any], run: Callable[[Any], Any]) -> list[float]:
    """Milliseconds of device time of `run(batch)`, for each batch: neither making it counts, nor launching its kernels,
    which takes a small batch longer than computing them.

    `QUEUED` batches are made at a time. Then the device is kept busy with nothing while the host queues all their work.
    """
    times_ms: list[float] = []
    batches = iter(batches)
    while chunk := list(itertools.islice(batches, QUEUED)):
        queue_ahead(AHEAD)
        times_ms += each(chunk, run)
    return times_ms


def epoch(batches: Callable[[int], Iterable[Any]], run: Callable[[Any], Any]) -> tuple[float, list[float], int]:
    """Seconds of an epoch by the clock, milliseconds of each batch, and the positions in all; `batches(epoch)`.

    By the clock is as a loop goes: a batch is made, copied and run, and the next. On a GPU the time of each batch is
    that of the device, from a second pass.
    """
    on_cuda, sizes = device().type == "cuda", []

    def counted() -> Iterator[Any]:
        for batch in batches(0):
            sizes.append(batch.inputs.numel())
            yield batch

    each(itertools.islice(batches(1), 30 if on_cuda else 2), run)  # warm up
    synchronize()
    began = time.perf_counter()
    times_ms = each(counted(), run)
    epoch_s = time.perf_counter() - began
    return epoch_s, device_ms(batches(0), run) if on_cuda else times_ms, sum(sizes)


def fits(step: Callable[[Any], Any], batches: list) -> bool:
    """Whether there is memory enough for a step on each batch, by trying. If not, what was taken is given back."""
    try:
        for batch in batches:
            step(batch)
        return True
    except Exception as error:
        if not is_out_of_memory(error):
            raise
    free_memory()
    return False


def rates(
    step: Callable[[Any], Any], batches: dict[str, list], real_tokens: dict[str, float], rounds: int
) -> dict[str, Row]:
    """For each variant, timed interleaved: median and spread of a step, real tokens a second over all steps.

    Each step takes the next of the variant's batches, round and round; `real_tokens` are those of a batch, on the mean.
    """
    endless = {name: itertools.cycle(of) for name, of in batches.items()}
    steps = {name: lambda of=of: step(next(of)) for name, of in endless.items()}
    timed = compare(steps, check=False, rounds=rounds, warmup=1)
    per_s = {name: real_tokens[name] * 1e3 / float(np.mean(timed.samples_ms[name])) for name in steps}
    return {name: timed.timing(name).row() | {"real_tokens_per_s": per_s[name]} for name in steps}


def training_step(parameters: Iterable[Tensor], loss: Callable[[Any], Tensor]) -> Callable[[Any], None]:
    """A step of training on a batch whose loss is `loss(batch)`: forward, backward and AdamW."""
    optimizer = torch.optim.AdamW(parameters, lr=1e-6, fused=True)

    def step(batch: Any) -> None:
        try:
            loss(batch).backward()
            optimizer.step()
        finally:  # after a lack of memory, too
            optimizer.zero_grad()

    return step
