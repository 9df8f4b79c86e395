"""Where the loader is the bottleneck and where it isn't: how long the device waits for data, measured and predicted.

A batch takes the device `step_ms`, and one core `batch · sample_ms` to decode, cut and collate. W workers do that side
by side, so the loop turns every `max(step_ms, batch · sample_ms / W)`, and the device is idle for the rest: workers
help until the two are equal, and no further. `predict` says so with what else counts (cores, a loss that is read).

What computes is one of three devices:

    simulated   a clock that is busy for `step_ms` a batch and uses no core, as a GPU does; the host sleeps
    cpu         a model trained on the CPU: workers and model compete for the same cores
    cuda        a model trained on the GPU; its idle share is taken between CUDA events around each step
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
from helpers.lab.machine import missing_because
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

# How many steps the host may be ahead of a simulated device. A real one's queue holds about as much.
AHEAD = 2


class JpegCrops(Dataset):
    """Item i: a JPEG, decoded; a random part of it, resized to (3, side, side) uint8; its label.

    The images stay in memory, compressed, so that no disk is measured. Item i is image i modulo their number, and its
    cut follows from `seed` and i alone, whoever loads it.
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
    """What such a loop needs, for `missing_because`. Memory is pinned for copies to a GPU."""
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
    """A row about a training loop that is fed by a `DataLoader`.

    `step_ms` is what a step of the simulated device takes; of a real one it is measured, on a batch that is already
    there, and `model` names what trains. `read_loss` makes the host wait for the device after each step; otherwise the
    device works on while the host fetches the next batch. Copies to the GPU are asynchronous if memory is pinned; if
    not, the host waits at each for all steps before it, loss read or not.

    `idle_share` is the share of the loop's time in which the device has no step to do, `predicted_idle_share` what
    `predict` makes of `step_ms` and `sample_ms`, the time of one sample in this process, before the loop and after it,
    when no worker competes. `wait_ms` is how long the host waits for a batch (median), `startup_s` how long for the
    first one, with starting the workers. The times are of one turn of the loop, `steps` of them, after as many to warm
    up as it takes to empty what the workers fetch in advance.
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
    count = (2 * warmup + steps) * batch  # the workers are still at it when the last step is timed
    dataset = JpegCrops(example_jpegs(16) if images is None else images, count, side, decode)
    loads = _load_ms(dataset, batch)
    if device == "simulated":
        work = _SimulatedDevice(step_ms, ahead=0 if read_loss else AHEAD)
    else:
        work = _Training(convnet(**MODELS[model]), torch.device(device), pin_memory, read_loss)
        step_ms = work.alone(_batch(dataset, batch))
    batches = _batches(dataset, batch, workers, pin_memory, prefetch_factor)
    startup_s, wait_ms = _loop(batches, work, warmup + steps)
    waits = read_loss or (device == "cuda" and not pin_memory)
    sample_ms = Timing.of(loads + _load_ms(dataset, batch)).median_ms / batch
    return (
        {"workers": workers, "device": device, "decode": decode, "batch": batch, "pin_memory": pin_memory}
        | {"prefetch_factor": prefetch_factor, "read_loss": read_loss, "model": "" if device == "simulated" else model}
        | {"cores": cores(), "shares_cores": device == "cpu", "step_ms": step_ms, "sample_ms": sample_ms}
        | _summary(work.spans(), warmup, batch)
        | {"predicted_idle_share": predict(step_ms, batch * sample_ms, workers, device=device, waits=waits)}
        | {"wait_ms": Timing.of(wait_ms[warmup:]).median_ms, "startup_s": startup_s}
    )


def predict(step_ms: float, load_ms: float, workers: int, *, device: str = "simulated", waits: bool = False) -> float:
    """The share of time in which the device idles, from what a batch takes it and what loading one takes a core.

    Without workers the process that feeds the device loads, which overlaps with the device's work unless the host
    `waits` for each step's end. There are no more hands than cores. On the CPU the model needs its threads' share of
    them too: what is left is a bound from above, as there a step gets slower with the competition.
    """
    hands = min(max(workers, 1), cores())
    overlap = workers > 0 or not (waits or device == "cpu")
    turn = max(step_ms, load_ms / hands) if overlap else step_ms + load_ms
    if device == "cpu":
        turn = max(turn, (step_ms * min(torch.get_num_threads(), cores()) + load_ms) / cores())
    return 1 - step_ms / turn


def convnet(width: int, depth: int, classes: int = CLASSES) -> nn.Sequential:
    """Pictures (B, 3, S, S) to logits: four stages of `depth` convolutions, half as large and twice as wide each."""
    layers: list[nn.Module] = []
    channels = 3
    for stage in range(4):
        for at in range(depth):
            wide = width * 2**stage
            layers.append(nn.Conv2d(channels, wide, 3, stride=2 if at == 0 else 1, padding=1, bias=False))
            layers += [nn.BatchNorm2d(wide), nn.ReLU(inplace=True)]
            channels = wide
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, classes))


class _SimulatedDevice:
    """Is busy for `step_ms` a batch, one after another. The host goes on until it is `ahead` steps ahead."""

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
    """Steps of a model on a real device, each between two moments of its clock."""

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

    def alone(self, batch: tuple[Tensor, Tensor]) -> float:
        """Milliseconds of a step when the batch is already there."""
        images, labels = (part.to(self.device) for part in batch)
        taken = each(range(10), lambda _: self._step(images, labels))
        return Timing.of(taken[3:]).median_ms

    def spans(self) -> list[tuple[float, float]]:
        """Begin and end of each step on the device's clock, in milliseconds. Waits for the device."""
        synchronize()
        first = self._moments[0][0]
        return [(between_ms(first, begin), between_ms(first, end)) for begin, end in self._moments]

    def _step(self, images: Tensor, labels: Tensor) -> Tensor:
        layout = torch.channels_last if self.device.type == "cuda" else torch.contiguous_format
        pixels = images.to(torch.float32, memory_format=layout) / 127.5 - 1  # (B, 3, side, side)
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.device.type == "cuda"):
            loss = F.cross_entropy(self.model(pixels), labels)
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return loss.detach()


def _loop(batches: Iterator, work: "_SimulatedDevice | _Training", steps: int) -> tuple[float, list[float]]:
    """Seconds until the first batch is there, and milliseconds of waiting for each."""
    waits = []
    for _ in range(steps):
        began = time.perf_counter()
        batch = next(batches)
        waits.append((time.perf_counter() - began) * 1e3)
        work(batch)
    return waits[0] / 1e3, waits


def _batches(dataset: Dataset, batch: int, workers: int, pin_memory: bool, prefetch_factor: int) -> Iterator:
    """A `DataLoader`'s batches in order; the workers start with the first one."""
    with warnings.catch_warnings():  # more workers than cores are what we want to see
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
    """What the device's steps tell, from the end of the last one that warms up."""
    ends = [end for _, end in spans[warmup - 1 :]]
    turns = Timing.of([end - before for before, end in pairwise(ends)])
    wall = ends[-1] - ends[0]
    busy = sum(end - begin for begin, end in spans[warmup:])
    return {"samples_per_s": 1e3 * turns.n * batch / wall, "idle_share": max(1 - busy / wall, 0.0)} | turns.row()


def _batch(dataset: Dataset, batch: int) -> tuple[Tensor, Tensor]:
    return tuple(default_collate([dataset[index] for index in range(batch)]))


def _load_ms(dataset: Dataset, batch: int, repeat: int = 3) -> list[float]:
    """Milliseconds that loading a batch takes this process, collating included; some times, after one to warm up."""
    taken = []
    for _ in range(repeat + 1):
        began = time.perf_counter()
        _batch(dataset, batch)
        taken.append((time.perf_counter() - began) * 1e3)
    return taken[1:]
