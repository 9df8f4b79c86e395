"""Is the loader the bottleneck? The device's idle time while it waits for data, measured and predicted.

A batch takes the device `step_ms`, and one core `batch · sample_ms` to decode, crop and collate. With W workers in
parallel an iteration takes `max(step_ms, batch · sample_ms / W)`, and the device is idle for the rest: more workers
help until the two are equal, or until there is no core left for another.

The device is a timer of `step_ms` a batch that uses no core, like a GPU: the host sleeps.
"""

import time
import warnings
from collections.abc import Iterator, Sequence
from itertools import pairwise

import numpy as np
from PIL import Image
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, default_collate

from helpers.lab.records import Row
from helpers.lab.timing import Timing
from helpers.pictures import cores
from helpers.pictures.transforms import cut_image, draw_cuts, random_boxes, to_tensor
from helpers.pipelines import decoders
from helpers.pipelines.decoders import ImageError, decode
from helpers.pipelines.samples import example_jpegs

CLASSES = 10
AHEAD = 2  # steps that the host may be ahead of the simulated device


class JpegCrops(Dataset):
    """Item i: a random crop of a decoded JPEG, resized to (3, side, side) uint8, and its label.

    The compressed images are in memory, so that no disk is measured. Item i is image i modulo their number, and its
    crop depends on `seed` and i only, not on the worker.
    """

    def __init__(self, images: Sequence[bytes], count: int, side: int, decoder: str, seed: int = 0) -> None:
        self.images, self.side, self.decoder = images, side, decoder
        self.cuts = draw_cuts(count, seed, 0)

    def __len__(self) -> int:
        return len(self.cuts)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        at = index % len(self.images)
        try:
            image = Image.fromarray(decode(self.decoder, self.images[at]))
        except ImageError as error:
            raise ImageError(f"image {at}: {error}") from None
        crop = cut_image(image, random_boxes(self.cuts[index], np.array(image.size)), self.side)
        if self.cuts[index, 4]:
            crop = crop.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
        return to_tensor(crop), at % CLASSES


def measure_loader(
    workers: int,
    step_ms: float,
    *,
    prefetch: int = 2,
    decode: str = decoders.REFERENCE,
    batch: int = 32,
    steps: int = 40,
    side: int = 64,
    images: Sequence[bytes] | None = None,
) -> Row:
    """Measure a loop of steps of `step_ms`, fed by a `DataLoader`; one row.

    The device works while the host fetches the next batch.

    `idle_share` is the share of the loop's time in which the device is idle; `predicted_idle_share` is `predict`'s,
    from `step_ms` and `sample_ms`, the time to load one sample in this process, without competing workers. `wait_ms` is
    the median of the host's wait for a batch, `startup_s` the wait for the first one, including the workers' start.
    Times are of `steps` iterations, after a warm-up that uses up the prefetched batches.
    """
    warmup = 3 + prefetch * workers
    count = (2 * warmup + steps) * batch  # enough that workers are still loading during the last timed step
    dataset = JpegCrops(example_jpegs(16) if images is None else images, count, side, decode)
    load_ms = _load_ms(dataset, batch)
    device = SimulatedDevice(step_ms)
    startup_s, wait_ms = run_loop(_batches(dataset, batch, workers, prefetch), device, warmup + steps)
    sample_ms = Timing.of(load_ms + _load_ms(dataset, batch)).median_ms / batch
    row = {"sample_ms": sample_ms, "predicted_idle_share": predict(step_ms, batch * sample_ms, workers)}
    row |= {"wait_ms": Timing.of(wait_ms[warmup:]).median_ms, "startup_s": startup_s}
    return row | summary(device.spans, warmup, batch)


def predict(step_ms: float, load_ms: float, workers: int) -> float:
    """The predicted idle share of the device, from its time for a batch and one core's time to load a batch.

    Without workers the main process loads, while the device works. Loading uses at most as many processes as there are
    cores.
    """
    return 1 - step_ms / max(step_ms, load_ms / min(max(workers, 1), cores()))


class SimulatedDevice:
    """A device that takes `step_ms` a batch, one after another. The host may be `AHEAD` steps ahead."""

    def __init__(self, step_ms: float) -> None:
        self.step_ms = step_ms
        self.spans: list[tuple[float, float]] = []  # begin and end of each step, in milliseconds

    def __call__(self, batch: tuple[Tensor, Tensor]) -> None:
        begin = time.perf_counter() * 1e3
        if self.spans:
            begin = max(begin, self.spans[-1][1])
        self.spans.append((begin, begin + self.step_ms))
        if len(self.spans) > AHEAD:
            time.sleep(max(self.spans[-1 - AHEAD][1] / 1e3 - time.perf_counter(), 0))


def run_loop(batches: Iterator, device: SimulatedDevice, steps: int) -> tuple[float, list[float]]:
    """Seconds of waiting for the first batch, and milliseconds of waiting for each."""
    waits = []
    for _ in range(steps):
        began = time.perf_counter()
        batch = next(batches)
        waits.append((time.perf_counter() - began) * 1e3)
        device(batch)
    return waits[0] / 1e3, waits


def _batches(dataset: Dataset, batch: int, workers: int, prefetch: int) -> Iterator:
    """A `DataLoader`'s batches in order; the workers start with the first one."""
    options = {"prefetch_factor": prefetch} if workers else {}
    with warnings.catch_warnings():  # measuring more workers than cores is intended
        warnings.filterwarnings("ignore", "This DataLoader will create", UserWarning)
        batches = iter(DataLoader(dataset, batch, num_workers=workers, **options))
    yield from batches


def summary(spans: list[tuple[float, float]], warmup: int, batch: int) -> Row:
    """Throughput, idle share and iteration times, from the begins and ends of the device's steps after warm-up."""
    ends = [end for _, end in spans[warmup - 1 :]]
    iterations = Timing.of([end - before for before, end in pairwise(ends)])
    wall_ms = ends[-1] - ends[0]
    device_ms = sum(end - begin for begin, end in spans[warmup:])
    speed = {"samples_per_s": 1e3 * iterations.n * batch / wall_ms, "idle_share": max(1 - device_ms / wall_ms, 0.0)}
    return speed | iterations.row()


def first_batch(dataset: Dataset, batch: int) -> tuple[Tensor, Tensor]:
    return tuple(default_collate([dataset[index] for index in range(batch)]))


def _load_ms(dataset: Dataset, batch: int, repeat: int = 3) -> list[float]:
    """Milliseconds of loading and collating a batch in this process, `repeat` times after a warm-up."""
    taken = []
    for _ in range(repeat + 1):
        began = time.perf_counter()
        first_batch(dataset, batch)
        taken.append((time.perf_counter() - began) * 1e3)
    return taken[1:]
