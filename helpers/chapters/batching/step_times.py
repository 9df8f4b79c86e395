"""Times of steps on many different batches: each batch by itself, and training steps of several variants in turn."""

import itertools
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ...lab import Row, compare, device, each
from ...lab.device_share import as_column, device_share
from ...lab.memory import free_memory, is_out_of_memory
from ...lab.timing import Timing, queue_ahead, synchronize
from ...training.text_batches import Feed

QUEUED = 20  # batches that wait on the device before the first is timed: fewer kernels than CUDA queues, about 1,000
PARTS = 10  # of an epoch, in which epochs take turns
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


@dataclass
class Epoch:
    """An epoch of batches by the clock, part by part: seconds and real tokens; of each batch the device's time.

    On a GPU the batches of a part are made first, and the loader's seconds are apart.
    """

    seconds: list[float] = field(default_factory=list)
    loader_s: float = 0.0
    loaded: list = field(default_factory=list)  # the last part's batches, on a GPU
    real: list[int] = field(default_factory=list)
    times_ms: list[float] = field(default_factory=list)
    positions: int = 0

    def go_on(self, batches: Iterable[Any], run: Callable[[Any], Any]) -> None:
        """The next part: each batch is made, copied and run, and the next; on a GPU all are made before."""
        if device().type == "cuda":
            batches = self._load(batches)
        taken: list[tuple[int, int]] = []

        def counted() -> Iterator[Any]:
            for batch in batches:
                taken.append((batch.real, batch.inputs.numel()))
                yield batch

        synchronize()
        began = time.perf_counter()
        self.times_ms += each(counted(), run)
        self.seconds.append(time.perf_counter() - began)
        real, positions = map(sum, zip(*taken, strict=True))
        self.real.append(real)
        self.positions += positions

    def _load(self, batches: Iterable[Any]) -> list[Any]:
        """The batches, on the device."""
        began = time.perf_counter()
        self.loaded = list(batches)
        synchronize()
        self.loader_s += time.perf_counter() - began
        return self.loaded

    def row(self, run: Callable[[Any], Any]) -> Row:
        """Seconds of the whole epoch, real tokens a second, and the microseconds of one in each part. On a GPU these
        are without the loader's seconds, a column of their own, and the device's share is the last part's."""
        us = 1e6 * np.divide(self.seconds, self.real)
        rate = sum(self.real) / sum(self.seconds)
        in_order = " ".join(f"{each:.6g}" for each in us)
        row = {"epoch_s": sum(self.seconds), "real_tokens_per_s": rate, "us_per_token": in_order}
        if not self.loaded:
            return row
        share = device_share(lambda: [run(batch) for batch in self.loaded], 1e3 * self.seconds[-1])
        return row | {"loader_s": self.loader_s} | share


def epochs(feeds: dict[str, Feed], run: Callable[[Any], Any]) -> dict[str, Epoch]:
    """An epoch of each, `run(batch)`; they take turns, part by part, so that the parts of two are pairs.

    By the clock is as a loop goes; on a GPU without the loader, and the time of each batch is that of the device, from
    a second pass.
    """
    on_cuda, epochs = device().type == "cuda", {name: Epoch() for name in feeds}
    for batches, _ in feeds.values():
        each(itertools.islice(batches(1), 30 if on_cuda else 2), run)  # warm up
    steps = {name: count(0) for name, (_, count) in feeds.items()}
    made = {name: batches(0) for name, (batches, _) in feeds.items()}
    parts = min(PARTS, *steps.values())
    for part in range(parts):
        for name in list(feeds)[:: -1 if part % 2 else 1]:
            until, since = (steps[name] * number // parts for number in (part + 1, part))
            epochs[name].go_on(itertools.islice(made[name], until - since), run)
    if on_cuda:
        for name, (batches, _) in feeds.items():
            epochs[name].times_ms = device_ms(batches(0), run)
    return epochs


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
        rate = {"real_tokens_per_s": 1e6 / float(np.median(us)), "us_per_token": in_order}
        rows[name] = of_step.row() | rate | as_column(timed.device_shares[name])
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
