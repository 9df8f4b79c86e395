"""`epoch`: training fed by a `DataLoader`, and what the host waits for meanwhile."""

import itertools
import time
from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

from helpers.lab import device, each
from helpers.lab.timing import synchronize
from helpers.models.llama import preset

from .run import random_tokens
from .setup import Setup
from .training import BEFORE_CAPTURE, Trainer


def epoch(setup: Setup, steps: int, workers: int, pinned: bool) -> dict[str, float]:
    """A row about so many training steps: their time, that of the epoch, and for each batch how long the host waits
    for the loader (`wait_ms`), and in the copy to the device (`copy_ms`). The first quarter of the steps isn't told of.

    A copy from pinned memory is queued at once. One from pageable memory waits its turn on the device, so its time is
    mostly that of the step before, which the host would have waited for anyway, only later.

    What is compiled, tuned and captured is so before the loader exists: no worker's or pinning thread's calls fall into
    the capture of a graph, and the epoch has none of it.
    """
    trainer = Trainer(setup)
    for tokens in itertools.islice(itertools.cycle(random_tokens(setup, 1)), BEFORE_CAPTURE + 1):
        trainer.step(tokens)
    rows = TensorDataset(torch.randint(preset(setup.model)["vocab_size"], (steps * setup.batch, setup.sequence + 1)))
    loader = DataLoader(rows, setup.batch, num_workers=workers, pin_memory=pinned and device().type == "cuda")
    waited_ms: list[float] = []
    copied_ms: list[float] = []
    batches = iter(loader)

    def fed() -> Iterator[Tensor]:
        while True:
            began = time.perf_counter()
            batch = next(batches, None)
            if batch is None:
                return
            came = time.perf_counter()
            there = batch[0].to(device(), non_blocking=pinned)
            waited_ms.append((came - began) * 1e3)
            copied_ms.append((time.perf_counter() - came) * 1e3)
            yield there

    synchronize()
    began = time.perf_counter()
    took_ms = each(fed(), trainer.step)
    epoch_s = time.perf_counter() - began
    settled = len(took_ms) // 4
    p20, median, p80 = np.percentile(took_ms[settled:], [20, 50, 80])
    spread = {"step_ms": float(median), "p20_ms": float(p20), "p80_ms": float(p80), "n": len(took_ms) - settled}
    host = {"wait_ms": float(np.median(waited_ms[settled:])), "copy_ms": float(np.median(copied_ms[settled:]))}
    return spread | host | {"epoch_s": epoch_s}
