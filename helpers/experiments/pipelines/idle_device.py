"""Is the loader the bottleneck? The device's idle time while it waits for data, measured and predicted.

A batch takes the device `step_ms`, and one core `batch · sample_ms` to decode, crop and collate. With W workers in
parallel an iteration takes `max(step_ms, batch · sample_ms / W)`, and the device is idle for the rest: more workers
help until the two are equal. `predict` also takes cores and synchronization into account.

Three devices:

    simulated   a timer of `step_ms` a batch that uses no core, like a GPU; the host sleeps
    cpu         a model trained on the CPU: workers and model compete for the same cores
    cuda        a model trained on the GPU; idle time is measured by CUDA events around each step
"""

import time
import warnings
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, default_collate

from helpers.lab.machine import half_dtype
from helpers.lab.records import Row
from helpers.lab.timing import Timing, between_ms, each, moment, synchronize
from helpers.pictures import cores
from helpers.pictures.transforms import cut_image, draw_cuts, random_boxes, to_tensor
from helpers.pipelines import decoders
from helpers.pipelines.decoders import ImageError, decode
from helpers.pipelines.samples import example_jpegs

CLASSES = 10
MODELS = {"cpu": (8, 1), "cuda": (64, 4)}  # width and depth; the latter takes 6 GFLOP forward for a picture of 224×224
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


def needs(device: str, decode: str = decoders.REFERENCE, pinned: bool = False) -> tuple[str, ...]:
    """Requirements of such a loop, for `missing_because`; pinned memory needs CUDA."""
    return (("CUDA",) if device == "cuda" or pinned else ()) + decoders.VARIANTS[decode].needs


def measure_loader(
    workers: int,
    device: str = "simulated",
    step_ms: float | None = None,
    *,
    pinned: bool = False,
    prefetch: int = 2,
    decode: str = decoders.REFERENCE,
    batch: int = 32,
    steps: int = 40,
    side: int = 64,
    images: Sequence[bytes] | None = None,
) -> Row:
    """Measure a training loop fed by a `DataLoader`; one row.

    `step_ms` is the step time of the simulated device; a real one's is measured, with the batch already on the device.
    The device works while the host fetches the next batch. Copies to the GPU are asynchronous from pinned memory;
    otherwise each copy waits for all previous steps.

    `idle_share` is the share of the loop's time in which the device is idle; `predicted_idle_share` is `predict`'s,
    from `device_ms`, a step's time, and `sample_ms`, the time to load one sample in this process, without competing
    workers. `wait_ms` is the median of the host's wait for a batch, `startup_s` the wait for the first one, including
    the workers' start. Times are of `steps` iterations, after a warm-up that uses up the prefetched batches.
    """
    warmup = 3 + prefetch * workers
    count = (2 * warmup + steps) * batch  # enough that workers are still loading during the last timed step
    dataset = JpegCrops(example_jpegs(16) if images is None else images, count, side, decode)
    load_ms = _load_ms(dataset, batch)
    if device == "simulated":
        train_step = SimulatedDevice(step_ms)
    else:
        train_step = Training(convnet(*MODELS[device]), torch.device(device), pinned)
        step_ms = train_step.without_loading(first_batch(dataset, batch))
    startup_s, wait_ms = run_loop(_batches(dataset, batch, workers, pinned, prefetch), train_step, warmup + steps)
    sample_ms = Timing.of(load_ms + _load_ms(dataset, batch)).median_ms / batch
    waits = device == "cuda" and not pinned
    predicted = predict(step_ms, batch * sample_ms, workers, device=device, waits=waits)
    row = {"sample_ms": sample_ms, "device_ms": step_ms, "predicted_idle_share": predicted}
    row |= {"wait_ms": Timing.of(wait_ms[warmup:]).median_ms, "startup_s": startup_s}
    return row | summary(train_step.spans(), warmup, batch)


def predict(step_ms: float, load_ms: float, workers: int, *, device: str = "simulated", waits: bool = False) -> float:
    """The predicted idle share of the device, from its time for a batch and one core's time to load a batch.

    Without workers the main process loads, which overlaps with the device's work unless the host `waits` for each
    step's end. Loading uses at most as many processes as there are cores. On the CPU the model's threads need cores
    too; the result is then an upper bound, as competition also makes steps slower.
    """
    loaders = min(max(workers, 1), cores())
    overlap = workers > 0 or not (waits or device == "cpu")
    iteration_ms = max(step_ms, load_ms / loaders) if overlap else step_ms + load_ms
    if device == "cpu":
        iteration_ms = max(iteration_ms, (step_ms * min(torch.get_num_threads(), cores()) + load_ms) / cores())
    return 1 - step_ms / iteration_ms


def convnet(width: int, depth: int, classes: int = CLASSES) -> nn.Sequential:
    """Pictures (B, 3, S, S) to logits (B, classes): four stages of `depth` convolutions, each halving the sides and
    doubling the channels."""
    layers: list[nn.Module] = []
    channels = 3
    for stage in range(4):
        for at in range(depth):
            out = width * 2**stage
            layers.append(nn.Conv2d(channels, out, 3, stride=2 if at == 0 else 1, padding=1, bias=False))
            layers += [nn.BatchNorm2d(out), nn.ReLU(inplace=True)]
            channels = out
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, classes))


class SimulatedDevice:
    """A device that takes `step_ms` a batch, one after another. The host may be `AHEAD` steps ahead."""

    def __init__(self, step_ms: float) -> None:
        self.step_ms = step_ms
        self._spans: list[tuple[float, float]] = []

    def __call__(self, batch: tuple[Tensor, Tensor]) -> None:
        begin = time.perf_counter() * 1e3
        if self._spans:
            begin = max(begin, self._spans[-1][1])
        self._spans.append((begin, begin + self.step_ms))
        if len(self._spans) > AHEAD:
            time.sleep(max(self._spans[-1 - AHEAD][1] / 1e3 - time.perf_counter(), 0))

    def spans(self) -> list[tuple[float, float]]:
        """Begin and end of each step, in milliseconds."""
        return self._spans


class Training:
    """Training steps of a model on a real device, timed by the device's clock."""

    def __init__(self, model: nn.Module, device: torch.device, pinned: bool) -> None:
        self.device, self.pinned = device, pinned
        self.layout = torch.channels_last if device.type == "cuda" else torch.contiguous_format
        self.model = model.to(device, memory_format=self.layout)
        self.optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
        self._moments: list[tuple[Any, Any]] = []  # where each step began and ended

    def __call__(self, batch: tuple[Tensor, Tensor]) -> None:
        images, labels = (part.to(self.device, non_blocking=self.pinned) for part in batch)
        begin = moment()
        self.step(images, labels)
        self._moments.append((begin, moment()))

    def without_loading(self, batch: tuple[Tensor, Tensor]) -> float:
        """Milliseconds of a step with the batch already on the device."""
        images, labels = (part.to(self.device) for part in batch)
        step_ms = each(range(10), lambda _: self.step(images, labels))
        return Timing.of(step_ms[3:]).median_ms

    def spans(self) -> list[tuple[float, float]]:
        """Begin and end of each step on the device's clock, in milliseconds. Waits for the device."""
        synchronize()
        first = self._moments[0][0]
        return [(between_ms(first, begin), between_ms(first, end)) for begin, end in self._moments]

    def step(self, images: Tensor, labels: Tensor) -> Tensor:
        pixels = images.to(torch.float32, memory_format=self.layout) / 127.5 - 1  # (B, 3, side, side)
        with torch.autocast(self.device.type, half_dtype(), enabled=self.device.type == "cuda"):
            loss = F.cross_entropy(self.model(pixels), labels)
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return loss.detach()


def run_loop(batches: Iterator, train_step: SimulatedDevice | Training, steps: int) -> tuple[float, list[float]]:
    """Seconds of waiting for the first batch, and milliseconds of waiting for each."""
    waits = []
    for _ in range(steps):
        began = time.perf_counter()
        batch = next(batches)
        waits.append((time.perf_counter() - began) * 1e3)
        train_step(batch)
    return waits[0] / 1e3, waits


def _batches(dataset: Dataset, batch: int, workers: int, pinned: bool, prefetch: int) -> Iterator:
    """A `DataLoader`'s batches in order; the workers start with the first one."""
    options = {"prefetch_factor": prefetch} if workers else {}
    with warnings.catch_warnings():  # measuring more workers than cores is intended
        warnings.filterwarnings("ignore", "This DataLoader will create", UserWarning)
        batches = iter(DataLoader(dataset, batch, num_workers=workers, pin_memory=pinned, **options))
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
