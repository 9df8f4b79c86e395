"""Training fed by a `DataLoader`."""

import itertools
import statistics
import time
from collections.abc import Iterator

from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

from ...lab import Timing, device, each
from ...lab.device_share import device_share
from ...lab.timing import synchronize
from ...rush import Setup, Trainer
from ...rush.measurement import sequences, spread, text_tokens
from ...training.step import WARM_UP


def epoch(setup: Setup, steps: int, workers: int, pinned: bool) -> dict[str, float]:
    """Time of `steps` training steps fed by a `DataLoader`, as a row: the step, and the medians of
    the host's wait for a batch (`wait_ms`) and in its copy to the device (`copy_ms`), without the first quarter.

    A copy from pinned memory is queued at once. One from pageable memory blocks the host until the device has reached
    it, so its time is mostly that of the previous step.

    Compiling, tuning and graph capture happen before the loader starts: they aren't in the epoch's time, and no CUDA
    call of a pinning thread can break the capture.
    """
    trainer = Trainer(setup)
    for tokens in itertools.islice(itertools.cycle(text_tokens(setup, 1)), WARM_UP + 1):
        trainer.step(tokens)
    rows = TensorDataset(sequences(setup, steps * setup.batch).cpu())
    loader = DataLoader(rows, setup.batch, num_workers=workers, pin_memory=pinned and device().type == "cuda")
    waited_ms: list[float] = []
    copied_ms: list[float] = []
    batches = iter(loader)

    def device_batches() -> Iterator[Tensor]:
        while True:
            began = time.perf_counter()
            batch = next(batches, None)
            if batch is None:
                return
            fetched = time.perf_counter()
            tokens = batch[0].to(device(), non_blocking=pinned)
            waited_ms.append((fetched - began) * 1e3)
            copied_ms.append((time.perf_counter() - fetched) * 1e3)
            yield tokens

    synchronize()
    step_ms = each(device_batches(), trainer.step)
    first = len(step_ms) // 4
    host = {"wait_ms": statistics.median(waited_ms[first:]), "copy_ms": statistics.median(copied_ms[first:])}
    timing = Timing.of(step_ms[first:])
    return spread(timing) | host | device_share(lambda: trainer.step(tokens), timing.median_ms)
