"""Times of steps on many different batches: each batch by itself, and training steps of several variants in turn."""

import itertools
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from helpers.lab import compare, device, each
from helpers.lab.experiment import free_memory, is_out_of_memory
from helpers.lab.records import Row
from helpers.lab.timing import queue_ahead, synchronize

QUEUED = 20  # batches that wait on the device before the first is timed: fewer kernels than CUDA queues, about 1,000
AHEAD = 40_000_000  # clock cycles, 20 to 40 ms: longer than the host takes to queue the work of so many batches
PERCENTILES = {"min_ms": 0, "p5_ms": 5, "p25_ms": 25, "median_ms": 50, "p75_ms": 75, "p95_ms": 95, "max_ms": 100}
RATE_COLUMNS = ("variant", "median_ms", "p20_ms", "p80_ms", "n", "real_tokens_per_s")  # of `rates`


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


def percentiles(times_ms: list[float]) -> Row:
    """A row's columns for the times of all batches."""
    row = {name: float(np.percentile(times_ms, share)) for name, share in PERCENTILES.items()}
    return row | {"mean_ms": float(np.mean(times_ms))}


@dataclass
class Steps:
    """A variant's training step, to be called again and again: each call takes the next batch, round and round."""

    step: Callable[[Any], Any]
    batches: list
    real_tokens: float  # of a batch, on the mean
    number: int = 0

    @classmethod
    def of(cls, step: Callable[[Any], Any], batches: list) -> "Steps":
        """With the real tokens counted; padding is 0."""
        return cls(step, batches, float(np.mean([int((batch.targets != 0).sum()) for batch in batches])))

    def __call__(self) -> None:
        self.step(self.batches[self.number % len(self.batches)])
        self.number += 1

    def fit(self) -> bool:
        """Whether there is memory enough for a step on each batch, by trying. If not, what was taken is given back."""
        try:
            for batch in self.batches:
                self.step(batch)
            return True
        except Exception as error:
            if not is_out_of_memory(error):
                raise
        free_memory()
        return False


def rates(steps: dict[str, Steps], rounds: int, warmup: int) -> list[Row]:
    """A row for each variant, timed interleaved: median and spread of a step, real tokens a second over all steps."""
    timed = compare(steps, check=False, rounds=rounds, warmup=warmup)
    return [
        {"variant": variant}
        | timed.timing(variant).row()
        | {"real_tokens_per_s": its.real_tokens * 1e3 / float(np.mean(timed.samples_ms[variant]))}
        for variant, its in steps.items()
    ]


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
