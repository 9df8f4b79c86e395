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
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, default_collate

from helpers.lab.arguments import check_at_least, check_choice, check_positive
from helpers.lab.machine import half_dtype, missing_because
from helpers.lab.timing import Timing, between_ms, each, moment, synchronize
from helpers.pictures import cores
from helpers.pictures.transforms import draw_cuts, random_boxes

from . import decoders
from .decoders import ImageError, decode
from .samples import example_jpegs

DEVICES = ("simulated", "cpu", "cuda")
DECODERS = [name for name, decoder in decoders.VARIANTS.items() if "CUDA" not in decoder.needs]  # for a worker
CLASSES = 10

# Plain stacks of convolutions; `full` takes 6 GFLOP (multiply and add as one) forward for a picture of 224×224.
MODELS = {"small": {"width": 8, "depth": 1}, "full": {"width": 64, "depth": 4}}

# Number of steps that the host may be ahead of the simulated device.
AHEAD = 2


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
        from PIL import Image

        at = index % len(self.images)
        try:
            pixels = decode(self.decoder, self.images[at])  # (H, W, 3)
        except ImageError as error:
            raise ImageError(f"image {at}: {error}") from None
        height, width = pixels.shape[:2]
        left, top, right, bottom = random_boxes(self.cuts[index], np.array([width, height]))
        rows = slice(int(top * height), max(round(bottom * height), int(top * height) + 1))
        columns = slice(int(left * width), max(round(right * width), int(left * width) + 1))
        part = Image.fromarray(np.ascontiguousarray(pixels[rows, columns]))
        small = np.asarray(part.resize((self.side, self.side), Image.Resampling.BILINEAR))
        if self.cuts[index, 4]:
            small = small[:, ::-1]  # left to right
        return torch.from_numpy(np.ascontiguousarray(small.transpose(2, 0, 1))), at % CLASSES


def needs(device: str = "simulated", decode: str = decoders.REFERENCE, pin_memory: bool = False) -> tuple[str, ...]:
    """Requirements of such a loop, for `missing_because`; pinned memory needs CUDA."""
    return (("CUDA",) if device == "cuda" or pin_memory else ()) + decoders.VARIANTS[decode].needs


def measure_loader(
    workers: int,
    *,
    device: str = "simulated",
    step_ms: float = 10.0,
    model: str = "small",
    pin_memory: bool = False,
    prefetch_factor: int = 2,
    decode: str = decoders.REFERENCE,
    read_loss: bool = False,
    batch: int = 32,
    steps: int = 40,
    side: int = 64,
    images: Sequence[bytes] | None = None,
) -> dict[str, Any]:
    """Measure a training loop fed by a `DataLoader`; one row.

    `step_ms` is the step time of the simulated device; a real one's is measured, with the batch already on the device,
    and `model` is trained. With `read_loss` the host waits for the device after each step; otherwise the device works
    while the host fetches the next batch. Copies to the GPU are asynchronous from pinned memory; otherwise each copy
    waits for all previous steps.

    `idle_share` is the share of the loop's time in which the device is idle; `predicted_idle_share` is `predict`'s,
    from `step_ms` and `sample_ms`, the time to load one sample in this process, without competing workers. `wait_ms` is
    the median of the host's wait for a batch, `startup_s` the wait for the first one, including the workers' start.
    Times are of `steps` iterations, after a warm-up that uses up the prefetched batches.
    """
    check_at_least(0, workers=workers)
    check_positive(prefetch_factor=prefetch_factor, batch=batch, steps=steps, side=side)
    check_choice(DEVICES, device=device)
    check_choice(MODELS, model=model)
    check_choice(DECODERS, decode=decode)
    if images is not None and not images:
        raise ValueError("images is empty; it must hold one JPEG or more")
    if not step_ms > 0:
        raise ValueError(f"step_ms is {step_ms!r}; it must be above 0")
    if reason := missing_because(*needs(device, decode, pin_memory)):
        raise ValueError(reason)
    warmup = 3 + prefetch_factor * workers
    count = (2 * warmup + steps) * batch  # enough that workers are still loading during the last timed step
    dataset = JpegCrops(example_jpegs(16) if images is None else images, count, side, decode)
    load_ms = _load_ms(dataset, batch)
    if device == "simulated":
        train_step = _SimulatedDevice(step_ms, ahead=0 if read_loss else AHEAD)
    else:
        train_step = _Training(convnet(**MODELS[model]), torch.device(device), pin_memory, read_loss)
        step_ms = train_step.without_loading(_batch(dataset, batch))
    batches = _batches(dataset, batch, workers, pin_memory, prefetch_factor)
    startup_s, wait_ms = _loop(batches, train_step, warmup + steps)
    waits = read_loss or (device == "cuda" and not pin_memory)
    sample_ms = Timing.of(load_ms + _load_ms(dataset, batch)).median_ms / batch
    return (
        {"workers": workers, "device": device, "decode": decode, "batch": batch, "pin_memory": pin_memory}
        | {"prefetch_factor": prefetch_factor, "read_loss": read_loss, "model": "" if device == "simulated" else model}
        | {"cores": cores(), "shares_cores": device == "cpu", "step_ms": step_ms, "sample_ms": sample_ms}
        | _summary(train_step.spans(), warmup, batch)
        | {"predicted_idle_share": predict(step_ms, batch * sample_ms, workers, device=device, waits=waits)}
        | {"wait_ms": Timing.of(wait_ms[warmup:]).median_ms, "startup_s": startup_s}
    )


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


class _SimulatedDevice:
    """A device that takes `step_ms` a batch, one after another. The host may be `ahead` steps ahead."""

    def __init__(self, step_ms: float, ahead: int) -> None:
        self.step_ms, self.ahead = step_ms, ahead
        self._spans: list[tuple[float, float]] = []

    def __call__(self, batch: tuple[Tensor, Tensor]) -> None:
        begin = time.perf_counter() * 1e3
        if self._spans:
            begin = max(begin, self._spans[-1][1])
        self._spans.append((begin, begin + self.step_ms))
        if len(self._spans) > self.ahead:
            time.sleep(max(self._spans[-1 - self.ahead][1] / 1e3 - time.perf_counter(), 0))

    def spans(self) -> list[tuple[float, float]]:
        """Begin and end of each step, in milliseconds."""
        return self._spans


class _Training:
    """Training steps of a model on a real device, timed by the device's clock."""

    def __init__(self, model: nn.Module, device: torch.device, pinned: bool, read_loss: bool) -> None:
        self.model, self.device, self.pinned, self.read_loss = model.to(device), device, pinned, read_loss
        if device.type == "cuda":
            self.model.to(memory_format=torch.channels_last)
        self.optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
        self._moments: list[tuple[Any, Any]] = []  # where each step began and ended

    def __call__(self, batch: tuple[Tensor, Tensor]) -> None:
        images, labels = (part.to(self.device, non_blocking=self.pinned) for part in batch)
        begin = moment()
        loss = self._step(images, labels)
        self._moments.append((begin, moment()))
        if self.read_loss:
            loss.item()

    def without_loading(self, batch: tuple[Tensor, Tensor]) -> float:
        """Milliseconds of a step with the batch already on the device."""
        images, labels = (part.to(self.device) for part in batch)
        step_ms = each(range(10), lambda _: self._step(images, labels))
        return Timing.of(step_ms[3:]).median_ms

    def spans(self) -> list[tuple[float, float]]:
        """Begin and end of each step on the device's clock, in milliseconds. Waits for the device."""
        synchronize()
        first = self._moments[0][0]
        return [(between_ms(first, begin), between_ms(first, end)) for begin, end in self._moments]

    def _step(self, images: Tensor, labels: Tensor) -> Tensor:
        layout = torch.channels_last if self.device.type == "cuda" else torch.contiguous_format
        pixels = images.to(torch.float32, memory_format=layout) / 127.5 - 1  # (B, 3, side, side)
        with torch.autocast(self.device.type, half_dtype(), enabled=self.device.type == "cuda"):
            loss = F.cross_entropy(self.model(pixels), labels)
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return loss.detach()


def _loop(batches: Iterator, train_step: "_SimulatedDevice | _Training", steps: int) -> tuple[float, list[float]]:
    """Seconds of waiting for the first batch, and milliseconds of waiting for each."""
    waits = []
    for _ in range(steps):
        began = time.perf_counter()
        batch = next(batches)
        waits.append((time.perf_counter() - began) * 1e3)
        train_step(batch)
    return waits[0] / 1e3, waits


def _batches(dataset: Dataset, batch: int, workers: int, pin_memory: bool, prefetch_factor: int) -> Iterator:
    """A `DataLoader`'s batches in order; the workers start with the first one."""
    with warnings.catch_warnings():  # measuring more workers than cores is intended
        warnings.filterwarnings("ignore", "This DataLoader will create", UserWarning)
        loader = DataLoader(
            dataset,
            batch_size=batch,
            num_workers=workers,
            pin_memory=pin_memory,
            prefetch_factor=prefetch_factor if workers else None,
        )
        batches = iter(loader)
    yield from batches


def _summary(spans: list[tuple[float, float]], warmup: int, batch: int) -> dict[str, float]:
    """Throughput, idle share and iteration times, from the begins and ends of the device's steps after warm-up."""
    ends = [end for _, end in spans[warmup - 1 :]]
    iterations = Timing.of([end - before for before, end in pairwise(ends)])
    wall_ms = ends[-1] - ends[0]
    device_ms = sum(end - begin for begin, end in spans[warmup:])
    speed = {"samples_per_s": 1e3 * iterations.n * batch / wall_ms, "idle_share": max(1 - device_ms / wall_ms, 0.0)}
    return speed | iterations.row()


def _batch(dataset: Dataset, batch: int) -> tuple[Tensor, Tensor]:
    return tuple(default_collate([dataset[index] for index in range(batch)]))


def _load_ms(dataset: Dataset, batch: int, repeat: int = 3) -> list[float]:
    """Milliseconds of loading and collating a batch in this process, `repeat` times after a warm-up."""
    taken = []
    for _ in range(repeat + 1):
        began = time.perf_counter()
        _batch(dataset, batch)
        taken.append((time.perf_counter() - began) * 1e3)
    return taken[1:]
