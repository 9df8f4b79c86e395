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
from ...lab.timing import Timing, queue_ahead, synchronize

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
    """For each variant, timed interleaved: median and spread of a step, real tokens a second, and each round's passes.

    A turn is a pass through all of a variant's batches, so that each round computes the same tokens and two variants'
    passes are a pair; `real_tokens` are those of a batch, on the mean.
    """
    passes = {name: lambda of=of: [step(batch) for batch in of] and None for name, of in batches.items()}
    timed = compare(passes, check=False, rounds=rounds, warmup=1)
    rows = {}
    for name, of in batches.items():
        of_step = Timing.of([ms / len(of) for ms in timed.samples_ms[name]])
        us = [1e3 * ms / len(of) / real_tokens[name] for ms in timed.samples_ms[name]]
        in_order = " ".join(f"{each:.6g}" for each in us)
        rows[name] = of_step.row() | {"real_tokens_per_s": 1e6 / float(np.median(us)), "us_per_token": in_order}
    return rows


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
